// Scores of blocks in float32: A B^T of all heads, or of two A their sum's product, or of two B the
// larger one of their products.
//
//   out[h, i, j] = scale * max over the B of  (sum of the A)[h, i] . B[h, j]
//
// A CTA of four warps makes 64 x 128 products, a thread 8 x 8. With one B those are of 128 of its
// rows; with two, of 64 rows of each, and a thread has the same four columns of both. Slices of 16
// channels lie in shared memory, channel by channel, so that a thread's operands are four reads of
// 16 bytes for 64 multiply-adds; the next slice is on its way meanwhile, in registers. Channels are
// summed in turn, with fused multiply-adds.
//
// Shared memory: 2 slices x 16 channels x (68 + 132) floats, 25 KB.
//
// Expected on an H200, a prediction, for 8 heads x 900 x 900 x d 128: 16,900 float32 multiply-adds
// a cycle at 1.75 GHz give 28 us a B; of 1,800 CTAs for two B four are on a multiprocessor, 3.4
// rounds, 12 % is edges: 85 us for both.
#pragma once

#include "common/types.cuh"

namespace tessera {

struct BlockScoresParams {
  const float* a[2];  // (planes, n, d); the second may be null
  const float* b[2];  // (planes, m, d); the second may be null
  float* out;         // (planes, n, m)
  i32 n;
  i32 m;
  i32 head_dim;
  i32 row_tiles;     // of 64 rows of A
  i32 column_tiles;  // of 128 columns, or of 64 with two B
  float scale;
  i32 vectors;  // 1: rows of A and B may be read 16 bytes at a time
  i32 vector_out;
};

struct ScoreTile {
  static constexpr int kRows = 64;
  static constexpr int kColumns = 128;
  static constexpr int kSlice = 16;
  static constexpr int kPad = 4;
  static constexpr int kThreads = 128;

  float a[2][kSlice][kRows + kPad];
  float b[2][kSlice][kColumns + kPad];
};

// Four channels of a row; zeros past the last channel, and of rows that there are not.
__device__ __forceinline__ float4 row_part(const float* row, int channel, int channels, bool there,
                                           bool vectors) {
  float4 part = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (!there || channel >= channels) return part;
  if (vectors) return __ldg(reinterpret_cast<const float4*>(row + channel));
  part.x = __ldg(row + channel);
  if (channel + 1 < channels) part.y = __ldg(row + channel + 1);
  if (channel + 2 < channels) part.z = __ldg(row + channel + 2);
  if (channel + 3 < channels) part.w = __ldg(row + channel + 3);
  return part;
}

template <int kColumns>
__device__ __forceinline__ void put(float (&slice)[ScoreTile::kSlice][kColumns], int quarter,
                                    int row, float4 part) {
  slice[4 * quarter][row] = part.x;
  slice[4 * quarter + 1][row] = part.y;
  slice[4 * quarter + 2][row] = part.z;
  slice[4 * quarter + 3][row] = part.w;
}

// Eight operands of a thread: four, and the four that are `apart` further.
__device__ __forceinline__ void take(float (&into)[8], const float* from, int apart) {
  const float4 low = *reinterpret_cast<const float4*>(from);
  const float4 high = *reinterpret_cast<const float4*>(from + apart);
  into[0] = low.x;
  into[1] = low.y;
  into[2] = low.z;
  into[3] = low.w;
  into[4] = high.x;
  into[5] = high.y;
  into[6] = high.z;
  into[7] = high.w;
}

template <int kWarps>
__device__ __forceinline__ void block_scores(const BlockScoresParams& p) {
  using Tile = ScoreTile;
  static_assert(kWarps * 32 == Tile::kThreads, "a thread has 8 x 8 of 64 x 128");
  static __shared__ __align__(16) Tile tile;

  const u32 tiles = static_cast<u32>(p.row_tiles) * p.column_tiles;
  const i64 plane = blockIdx.x / tiles;
  const int first_row = static_cast<int>(blockIdx.x % tiles / p.column_tiles) * Tile::kRows;
  const bool two = p.b[1] != nullptr;
  const int columns = two ? Tile::kColumns / 2 : Tile::kColumns;
  const int first_column = static_cast<int>(blockIdx.x % tiles % p.column_tiles) * columns;

  // Of each slice a thread brings two parts of A and four of B: rows 32 apart, the same channels.
  const int quarter = threadIdx.x & 3;
  const int line = threadIdx.x >> 2;
  const float* const a = p.a[0] + plane * p.n * p.head_dim;
  const i64 second = p.a[1] == nullptr ? 0 : p.a[1] - p.a[0];
  float4 from_a[2];
  float4 from_b[4];
  auto fetch = [&](int slice) {
    const int channel = slice * Tile::kSlice + 4 * quarter;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row + line + 32 * i;
      const float* const at = a + static_cast<i64>(row) * p.head_dim;
      const bool there = row < p.n;
      from_a[i] = row_part(at, channel, p.head_dim, there, p.vectors);
      if (p.a[1] != nullptr) {
        const float4 more = row_part(at + second, channel, p.head_dim, there, p.vectors);
        from_a[i].x += more.x;
        from_a[i].y += more.y;
        from_a[i].z += more.z;
        from_a[i].w += more.w;
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool of_second = two && i >= 2;
      const int row = first_column + line + 32 * (of_second ? i - 2 : i);
      const float* const at = (of_second ? p.b[1] : p.b[0]) + (plane * p.m + row) * p.head_dim;
      from_b[i] = row_part(at, channel, p.head_dim, row < p.m, p.vectors);
    }
  };
  auto store = [&](int stage) {
#pragma unroll
    for (int i = 0; i < 2; ++i) put(tile.a[stage], quarter, line + 32 * i, from_a[i]);
#pragma unroll
    for (int i = 0; i < 4; ++i) put(tile.b[stage], quarter, line + 32 * i, from_b[i]);
  };

  const int tx = threadIdx.x & 15;
  const int ty = threadIdx.x >> 4;
  float sum[8][8];
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[i][j] = 0.0f;

  const int slices = (p.head_dim + Tile::kSlice - 1) / Tile::kSlice;
  fetch(0);
  store(0);
  __syncthreads();
#pragma unroll 1
  for (int slice = 0; slice < slices; ++slice) {
    const int stage = slice & 1;
    if (slice + 1 < slices) fetch(slice + 1);
#pragma unroll
    for (int k = 0; k < Tile::kSlice; ++k) {
      float left[8];
      float right[8];
      take(left, &tile.a[stage][k][4 * ty], 32);
      take(right, &tile.b[stage][k][4 * tx], 64);
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) sum[i][j] = fmaf(left[i], right[j], sum[i][j]);
    }
    // The other stage was last read before the barrier that ended the slice before this one.
    if (slice + 1 < slices) store(stage ^ 1);
    __syncthreads();
  }

#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = first_row + 4 * ty + (i & 3) + 32 * (i >> 2);
    if (row >= p.n) continue;
    float* const out = p.out + (plane * p.n + row) * p.m;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (two && half == 1) break;
      const int column = first_column + 4 * tx + 64 * half;
      float made[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float product = sum[i][4 * half + j];
        made[j] = p.scale * (two ? fmaxf(product, sum[i][4 + j]) : product);
      }
      if (p.vector_out && column < p.m) {
        *reinterpret_cast<float4*>(out + column) = make_float4(made[0], made[1], made[2], made[3]);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (column + j < p.m) out[column + j] = made[j];
      }
    }
  }
}

}  // namespace tessera

// The one entry of a specialisation.
#define TESSERA_BLOCK_SCORES(WARPS, MIN_CTAS)                                   \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)            \
      block_scores(const __grid_constant__ tessera::BlockScoresParams params) { \
    tessera::block_scores<WARPS>(params);                                       \
  }
