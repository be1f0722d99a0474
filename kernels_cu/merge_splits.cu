// Merges the split-K parts of a tile, in slot order, so results are bitwise repeatable.
//
//   M = max_i m_i,  w_i = 2^(m_i - M),  O = sum_i w_i O_i / sum_i w_i l_i,
//   LSE = ln 2 * M + ln sum_i w_i l_i
//
// Part i holds unnormalised O_i (float32), the reference maximum m_i (log2 units) and the sum l_i.
// One warp takes one row of a split tile, then of the one a grid further. A lane has the (m, l) of
// one part, and of every part four neighbouring elements of the row, so that the reads of many
// parts are under way together. grid = (split tiles or fewer, row groups): where a GPU made the
// plan, the tiles that there may be are many more than there mostly are, and a CTA with nothing to
// do costs time too. No shared memory.
#pragma once

#include "common/builders.cuh"
#include "common/ptx.cuh"
#include "common/types.cuh"

namespace tessera {

inline constexpr int kMaxHeadDim = 256;  // of the catalog

template <typename T, int kWarps>
__device__ __forceinline__ void merge_row(const MergeParams& p, int merge) {
  const int lane = threadIdx.x & 31;
  const int row = blockIdx.y * kWarps + (threadIdx.x >> 5);
  const int tile = p.merge_tile[merge];
  const i32 word = p.tile_q[2 * tile + 1];
  int rows = rows_of(word);
  int of_tile = row;  // among the tile's rows that exist
  if (first_half(word) >= 0) {
    const int first = first_half(word);
    const bool second = row >= p.tile_rows / 2;
    of_tile -= second ? p.tile_rows / 2 - first : 0;
    rows = second ? rows : first;
  }
  if (of_tile >= rows) return;
  const int begin = p.merge_offsets[merge];
  const int end = p.merge_offsets[merge + 1];
  const float2* parts = reinterpret_cast<const float2*>(p.partial_ml);

  float top = negative_infinity();
  for (int slot = begin + lane; slot < end; slot += 32) {
    top = fmaxf(top, parts[static_cast<i64>(slot) * p.tile_rows + row].x);
  }
#pragma unroll
  for (int other = 16; other > 0; other /= 2) {
    top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, other));
  }

  // A part without keys has l = 0, an m that lies below any other, and an O that was not written;
  // with no keys in any part all weights are 0.
  constexpr int kReads = kMaxHeadDim / 128;  // of four elements of a row
  float4 sum[kReads] = {};
  float total = 0.0f;
  for (int first = begin; first < end; first += 32) {
    const bool mine = first + lane < end;
    const float2 part = mine ? parts[static_cast<i64>(first + lane) * p.tile_rows + row]
                             : float2{negative_infinity(), 0.0f};
    const bool live = part.y != 0.0f;
    const float weight = live ? exp2_approx(part.x - top) : 0.0f;
    if (live) total += weight * part.y;
    const u32 all_live = __ballot_sync(kAllLanes, live);
    const int count = min(32, end - first);
#pragma unroll 4
    for (int i = 0; i < count; ++i) {
      const float w = __shfl_sync(kAllLanes, weight, i);
      const bool counts = (all_live >> i & 1) != 0;
      const float* of =
          p.partial_o + (static_cast<i64>(first + i) * p.tile_rows + row) * p.row_width;
#pragma unroll
      for (int read = 0; read < kReads; ++read) {
        const int d = 128 * read + 4 * lane;
        if (d < p.head_dim) {
          const float4 o = *reinterpret_cast<const float4*>(of + d);
          sum[read].x += counts ? w * o.x : 0.0f;
          sum[read].y += counts ? w * o.y : 0.0f;
          sum[read].z += counts ? w * o.z : 0.0f;
          sum[read].w += counts ? w * o.w : 0.0f;
        }
      }
    }
  }
#pragma unroll
  for (int other = 16; other > 0; other /= 2) {
    total += __shfl_xor_sync(kAllLanes, total, other);
  }
  const float inverse = total != 0.0f ? 1.0f / total : 0.0f;

  const int flat = p.merge_head[merge];
  const int target_row = p.units == nullptr
                             ? p.tile_q[2 * tile] + of_tile
                             : p.units[tile * (p.tile_rows / 16) + row / 16] + row % 16;
  u16* out = static_cast<u16*>(p.o) + (flat / p.q_heads) * p.o_stride.batch +
             (flat % p.q_heads) * p.o_stride.head + target_row * p.o_stride.row;
#pragma unroll
  for (int read = 0; read < kReads; ++read) {
    const int d = 128 * read + 4 * lane;
    if (d < p.head_dim) {
      u32* two = reinterpret_cast<u32*>(out + d);
      two[0] = pack2<T>(inverse * sum[read].x, inverse * sum[read].y);
      two[1] = pack2<T>(inverse * sum[read].z, inverse * sum[read].w);
    }
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
