// Rows of (batch, heads, tokens, d) tensors into an order of each head, or back, as bytes: row i of
// the target is row order[i] of the source; inverse, row order[i] of the target is row i.
//
// blockIdx.y: the tensor, of up to three with the same geometry. Along x the CTAs, about as many as
// the GPU holds, walk over chunks of rows, head by head. 2^lanes_log2 neighbouring threads share a
// row, 16 bytes each where addresses allow it, so that a row of d = 128 in 16 bits is read as whole
// 128-byte lines by half a warp, which reads the row's index as one broadcast. A thread first reads
// kRows indices, then kRows rows, and only then writes: 64 bytes a thread are in flight, 64 KB a
// multiprocessor at four CTAs, where 4.8 TB/s need about 30. No shared memory.
//
// Expected on an H200, a prediction: the time of a copy of the same bytes, as the indices come from
// L2 from the second head on. 75,600 tokens x 40 heads x 128 x 2 bytes, 0.77 GB read and written:
// 0.32 ms at 4.8 TB/s, about 0.38 ms at the 85 to 90 % that copies reach; q, k and v together
// 1.1 ms.
#pragma once

#include "common/types.cuh"

namespace tessera {

inline constexpr int kMostMoves = 3;

struct PermuteParams {
  const u8* source[kMostMoves];
  u8* target[kMostMoves];
  Strides source_stride[kMostMoves];  // bytes
  Strides target_stride[kMostMoves];  // bytes
  i32 width[kMostMoves];              // bytes that one access moves: 16, 4 or 2
  i32 lanes_log2[kMostMoves];         // threads of a row
  const i32* orders;                  // (order_count, tokens)
  const i32* choice;                  // (batch, heads), or null: order 0
  i32 order_count;
  i32 planes;  // batch * heads
  i32 heads;
  i32 tokens;
  i32 row_bytes;
  i32 inverse;
  i32 only;  // move the heads that chose this order alone; negative: all
};

// The work of one tensor, in accesses of one Vector.
template <typename Vector, int kThreads>
__device__ __forceinline__ void permute_rows(const PermuteParams& p, int tensor) {
  constexpr int kRows = 4;
  const int lanes_log2 = p.lanes_log2[tensor];
  const u32 lane = threadIdx.x & ((1u << lanes_log2) - 1);
  const u32 group = threadIdx.x >> lanes_log2;
  const u32 groups = kThreads >> lanes_log2;
  const u32 tokens = static_cast<u32>(p.tokens);
  const u32 vectors = static_cast<u32>(p.row_bytes) / sizeof(Vector);
  const i64 source_row = p.source_stride[tensor].row;
  const i64 target_row = p.target_stride[tensor].row;
  const bool inverse = p.inverse != 0;

  // Division once: a step of gridDim.x chunks is so many heads and so many chunks of a head.
  const u32 chunks = (tokens - 1) / (groups * kRows) + 1;
  const u32 planes = static_cast<u32>(p.planes);
  const u32 plane_step = gridDim.x / chunks;
  const u32 chunk_step = gridDim.x % chunks;
  u32 plane = blockIdx.x / chunks;
  u32 chunk = blockIdx.x % chunks;
  auto next = [&] {
    plane += plane_step;
    chunk += chunk_step;
    if (chunk >= chunks) {
      chunk -= chunks;
      ++plane;
    }
  };
  for (; plane < planes; next()) {
    const i64 batch = plane / static_cast<u32>(p.heads);
    const i64 head = plane % static_cast<u32>(p.heads);
    // A choice out of range must not lead out of the orders.
    const int chosen = p.choice == nullptr ? 0 : __ldg(p.choice + plane);
    if (p.only >= 0 && chosen != p.only) continue;
    const int order = max(0, min(chosen, p.order_count - 1));
    const i32* const places = p.orders + static_cast<i64>(order) * tokens;
    const u8* const source = p.source[tensor] + batch * p.source_stride[tensor].batch +
                             head * p.source_stride[tensor].head;
    u8* const target = p.target[tensor] + batch * p.target_stride[tensor].batch +
                       head * p.target_stride[tensor].head;

    const u32 first = chunk * (groups * kRows) + group;
    u32 place[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const u32 row = first + r * groups;
      place[r] = row < tokens ? static_cast<u32>(__ldg(places + row)) : 0;
    }
    for (u32 at = lane; at < vectors; at += 1u << lanes_log2) {
      Vector value[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const u32 row = first + r * groups;
        const u8* const from = source + (inverse ? row : place[r]) * source_row;
        if (row < tokens) value[r] = __ldg(reinterpret_cast<const Vector*>(from) + at);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const u32 row = first + r * groups;
        u8* const to = target + (inverse ? place[r] : row) * target_row;
        if (row < tokens) reinterpret_cast<Vector*>(to)[at] = value[r];
      }
    }
  }
}

template <int kWarps>
__device__ __forceinline__ void permute_tokens(const PermuteParams& p) {
  const int tensor = blockIdx.y;
  if (p.width[tensor] == 16) {
    permute_rows<uint4, kWarps * 32>(p, tensor);
  } else if (p.width[tensor] == 4) {
    permute_rows<u32, kWarps * 32>(p, tensor);
  } else {
    permute_rows<u16, kWarps * 32>(p, tensor);
  }
}

}  // namespace tessera

// The one entry of a specialisation.
#define TESSERA_PERMUTE_TOKENS(WARPS, MIN_CTAS)                               \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)          \
      permute_tokens(const __grid_constant__ tessera::PermuteParams params) { \
    tessera::permute_tokens<WARPS>(params);                                   \
  }
