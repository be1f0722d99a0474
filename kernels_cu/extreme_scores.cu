// Scores of blocks by the largest and smallest values of their tokens, on tensor cores:
//
//   out[h, i, j] = max((a_high + a_low)[i] . b_high[j], (a_high + a_low)[i] . b_low[j])
//
// Extremes of 16-bit tokens are 16-bit themselves, so a product of [a_high | a_low] with
// [b_high | b_high] has exact factors, and sums in float32. A CTA makes 128 x 128 products
// (common/product.cuh): of 128 rows of A, and of 64 of B with both of its extremes. Their rows take
// turns in eights, so that a thread has both products of a score.
//
// Shared memory: the product's 48 KB.
//
// Expected on an H200, a prediction, for 8 heads x 900 x 900 x d 128: 8.1 GFLOP with the tiles'
// edges, at 300 TFLOP/s 27 us; two CTAs a multiprocessor, 960 in all, 3.6 rounds: 30 us. The 26 MB
// of scores stay mostly in L2. In float32 it would be 85 us (block_scores.cu).
#pragma once

#include "common/product.cuh"

namespace tessera {

struct ExtremeScoresParams {
  const void* a;  // (planes, n, 2, 8 chunks) of T: largest, then smallest values
  const void* b;  // (planes, m, 2, 8 chunks)
  float* out;     // (planes, n, m)
  i32 n;
  i32 m;
  i32 chunks;        // 16-byte chunks of d channels
  i32 row_tiles;     // of 128
  i32 column_tiles;  // of 64
};

// Rows of `chunks` chunks, each of which is read twice; zeros follow.
struct TwiceRows {
  u64 at;
  u64 gap;
  bool there[2];
  bool again;
  i32 chunk;
  i32 chunks;

  __device__ __forceinline__ bool valid(int i) const { return there[i] && chunk < 2 * chunks; }
  __device__ __forceinline__ void advance(int by) {
    at += static_cast<u64>(by) * 16u;
    chunk += by;
    if (chunk >= chunks && !again) {
      at -= static_cast<u64>(chunks) * 16u;
      again = true;
    }
  }
};

template <typename T>
__device__ __forceinline__ void extreme_scores(const ExtremeScoresParams& p) {
  extern __shared__ __align__(1024) u8 dynamic_smem[];
  Product<T> product(dynamic_smem);
  constexpr int kRows = Product<T>::kTile;
  constexpr int kColumns = kRows / 2;
  const u32 tiles = static_cast<u32>(p.row_tiles) * p.column_tiles;
  const i64 plane = blockIdx.x / tiles;
  const int first_row = static_cast<int>(blockIdx.x % tiles / p.column_tiles) * kRows;
  const int first_column = static_cast<int>(blockIdx.x % tiles % p.column_tiles) * kColumns;
  const u64 half_bytes = static_cast<u64>(p.chunks) * 16u;

  const int copied = product.copied_row();
  ForwardRows a;
  a.at = reinterpret_cast<u64>(p.a) + (plane * p.n + first_row + copied) * 2 * half_bytes;
  a.gap = 64 * 2 * half_bytes;
  TwiceRows b;
  const int column = first_column + copied / 16 * 8 + copied % 8;
  b.at = reinterpret_cast<u64>(p.b) + (plane * p.m + column) * 2 * half_bytes +
         (copied / 8 % 2) * half_bytes;
  b.gap = 32 * 2 * half_bytes;
  b.again = false;
  b.chunk = 0;
  b.chunks = p.chunks;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    a.left[i] = first_row + copied + 64 * i < p.n ? 2 * p.chunks : 0;
    b.there[i] = column + 32 * i < p.m;
  }
  a.advance(product.copied_chunk());
  b.advance(product.copied_chunk());
  product.run((2 * p.chunks + Product<T>::kSliceChunks - 1) / Product<T>::kSliceChunks, a, b);

  const bool pairs = p.m % 2 == 0;
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    const int row = first_row + product.row(r >> 1, r & 1);
    if (row >= p.n) continue;
    float* const out = p.out + (plane * p.n + row) * p.m;
#pragma unroll
    for (int t = 0; t < 4; t += 2) {
      const int at = first_column + product.column(t) / 16 * 8 + product.column(t) % 8;
      float score[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int part = 2 * (r & 1) + e;
        score[e] = fmaxf(product.c[r >> 1][t][part], product.c[r >> 1][t + 1][part]);
      }
      if (pairs && at < p.m) {
        *reinterpret_cast<float2*>(out + at) = make_float2(score[0], score[1]);
      } else {
        if (at < p.m) out[at] = score[0];
        if (at + 1 < p.m) out[at + 1] = score[1];
      }
    }
  }
}

}  // namespace tessera

// The one entry of a specialisation.
#define TESSERA_EXTREME_SCORES(T, WARPS, MIN_CTAS)                                  \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)                \
      extreme_scores(const __grid_constant__ tessera::ExtremeScoresParams params) { \
    static_assert(WARPS == tessera::Product<tessera::T>::kWarps);                   \
    tessera::extreme_scores<tessera::T>(params);                                    \
  }
