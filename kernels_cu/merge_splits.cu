// Merges the split-K parts of a tile, in slot order, so results are bitwise repeatable.
//
//   M = max_i m_i,  w_i = 2^(m_i - M),  O = sum_i w_i O_i / sum_i w_i l_i,
//   LSE = ln 2 * M + ln sum_i w_i l_i
//
// Part i holds unnormalised O_i (float32), the reference maximum m_i (log2 units) and the sum l_i.
// One warp takes one row of a split tile, then of the one a grid further; lanes stride over the
// head dim in pairs. grid = (split tiles or fewer, row groups): where a GPU made the plan, the
// tiles that there may be are many more than there mostly are, and a CTA with nothing to do costs
// time too. No shared memory.
#pragma once

#include "common/ptx.cuh"
#include "common/types.cuh"

namespace tessera {

template <typename T, int kWarps>
__device__ __forceinline__ void merge_row(const MergeParams& p, int merge) {
  const int lane = threadIdx.x & 31;
  const int row = blockIdx.y * kWarps + (threadIdx.x >> 5);
  const int tile = p.merge_tile[merge];
  if (row >= p.tile_q[2 * tile + 1]) return;
  const int begin = p.merge_offsets[merge];
  const int end = p.merge_offsets[merge + 1];
  const float2* parts = reinterpret_cast<const float2*>(p.partial_ml);

  float top = negative_infinity();
  for (int slot = begin; slot < end; ++slot) {
    top = fmaxf(top, parts[static_cast<i64>(slot) * p.tile_rows + row].x);
  }
  // A part without keys has l = 0, and an m that lies below any other; with no keys in any part all
  // weights are 0.
  float total = 0.0f;
  for (int slot = begin; slot < end; ++slot) {
    const float2 part = parts[static_cast<i64>(slot) * p.tile_rows + row];
    if (part.y != 0.0f) total += exp2_approx(part.x - top) * part.y;
  }
  const float inverse = total != 0.0f ? 1.0f / total : 0.0f;

  const int flat = p.merge_head[merge];
  const int target_row = p.units == nullptr
                             ? p.tile_q[2 * tile] + row
                             : p.units[tile * (p.tile_rows / 16) + row / 16] + row % 16;
  u16* out = static_cast<u16*>(p.o) + (flat / p.q_heads) * p.o_stride.batch +
             (flat % p.q_heads) * p.o_stride.head + target_row * p.o_stride.row;
  for (int d = 2 * lane; d < p.head_dim; d += 64) {
    float x = 0.0f;
    float y = 0.0f;
    for (int slot = begin; slot < end; ++slot) {
      const i64 index = static_cast<i64>(slot) * p.tile_rows + row;
      const float2 part = parts[index];
      if (part.y != 0.0f) {
        const float weight = exp2_approx(part.x - top) * inverse;
        const float2 o = *reinterpret_cast<const float2*>(p.partial_o + index * p.row_width + d);
        x += weight * o.x;
        y += weight * o.y;
      }
    }
    *reinterpret_cast<u32*>(out + d) = pack2<T>(x, y);
  }
  if (p.lse != nullptr && lane == 0) {
    p.lse[static_cast<i64>(flat) * p.sq + target_row] =
        total != 0.0f ? (top + log2_approx(total)) * 0.6931471805599453f : negative_infinity();
  }
}

template <typename T, int kWarps>
__device__ __forceinline__ void merge_splits(const MergeParams& p) {
  const int merges = p.counts == nullptr ? gridDim.x : static_cast<int>(p.counts[kMerges]);
#pragma unroll 1
  for (int merge = blockIdx.x; merge < merges; merge += gridDim.x) merge_row<T, kWarps>(p, merge);
}

}  // namespace tessera

// The one entry of a specialisation. Four CTAs a multiprocessor are named because NVRTC 12.9 spills
// at five on some architectures, and NVRTC 13.5 where none are.
#define TESSERA_MERGE_SPLITS(T, WARPS)                                    \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, 4)             \
      merge_splits(const __grid_constant__ tessera::MergeParams params) { \
    tessera::merge_splits<tessera::T, WARPS>(params);                     \
  }
