// Products of rows of float32, A B^T of all heads, on tensor cores:
//
//   out[h, i, j] = scale * A[h, i] . B[h, j]
//
// For rows of whole 16 bytes; block_scores.cu takes others, and sums and maxima. A CTA makes 128 x
// 128 products, each of which is as good as three tf32 products of parts make it
// (common/product.cuh).
//
// Shared memory: the product's 48 KB.
//
// Expected on an H200, a prediction, for 8 heads x 960 x 960 x d 128: 512 CTAs, two on a
// multiprocessor, of 6.3 million tf32 multiply-adds; at 60 % of the matrix rate 24 us, with the
// beginnings and ends of CTAs 28. block_scores.cu, with float32 multiply-adds, takes 50 us by the
// same reckoning. For 1,440 x 1,440: 60 us and 110; for 300 x 1,000, a single round, 15 and 17.
#pragma once

#include "common/product.cuh"

namespace tessera {

struct BlockProductsParams {
  const float* a;  // (planes, n, 4 chunks)
  const float* b;  // (planes, m, 4 chunks)
  float* out;      // (planes, n, m)
  i32 n;
  i32 m;
  i32 chunks;        // of 16 bytes a row
  i32 row_tiles;     // of 128 rows of A
  i32 column_tiles;  // of 128 rows of B
  float scale;
};

__device__ __forceinline__ void block_products(const BlockProductsParams& p) {
  extern __shared__ __align__(1024) u8 dynamic_smem[];
  using Scores = Product<float>;
  Scores product(dynamic_smem);
  const u32 tiles = static_cast<u32>(p.row_tiles) * p.column_tiles;
  const i64 plane = blockIdx.x / tiles;
  const int first_row = static_cast<int>(blockIdx.x % tiles / p.column_tiles) * Scores::kTile;
  const int first_column = static_cast<int>(blockIdx.x % tiles % p.column_tiles) * Scores::kTile;
  const u64 row_bytes = static_cast<u64>(p.chunks) * 16u;

  const int copied = product.copied_row();
  auto rows = [&](const float* side, i32 length, int first) {
    ForwardRows made;
    made.at = reinterpret_cast<u64>(side) + (plane * length + first + copied) * row_bytes;
    made.gap = 64 * row_bytes;
#pragma unroll
    for (int i = 0; i < 2; ++i) made.left[i] = first + copied + 64 * i < length ? p.chunks : 0;
    made.advance(product.copied_chunk());
    return made;
  };
  product.run((p.chunks + Scores::kSliceChunks - 1) / Scores::kSliceChunks,
              rows(p.a, p.n, first_row), rows(p.b, p.m, first_column));

  const bool pairs = p.m % 2 == 0;
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    const int row = first_row + product.row(r >> 1, r & 1);
    if (row >= p.n) continue;
    float* const out = p.out + (plane * p.n + row) * p.m;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const int at = first_column + product.column(t);
      const float first = p.scale * product.c[r >> 1][t][2 * (r & 1)];
      const float second = p.scale * product.c[r >> 1][t][2 * (r & 1) + 1];
      if (pairs && at < p.m) {
        *reinterpret_cast<float2*>(out + at) = make_float2(first, second);
      } else {
        if (at < p.m) out[at] = first;
        if (at + 1 < p.m) out[at + 1] = second;
      }
    }
  }
}

}  // namespace tessera

// The one entry of a specialisation.
#define TESSERA_BLOCK_PRODUCTS(WARPS, MIN_CTAS)                                           \
  static_assert(WARPS == tessera::Product<float>::kWarps, "the product has eight warps"); \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)                      \
      block_products(const __grid_constant__ tessera::BlockProductsParams params) {       \
    tessera::block_products(params);                                                      \
  }
