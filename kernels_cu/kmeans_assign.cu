// The nearest centroid of each token, by Euclidean distance:
//
//   label[t] = argmax_c  x[t] . c  -  |c|^2 / 2        ties to the lower c
//
// since |x - c|^2 = |x|^2 - 2 (x . c - |c|^2 / 2). One CTA takes 128 tokens and walks over the
// centroids, 128 at a time, with tensor-core products (common/product.cuh); each thread keeps the
// best of the columns that it has of its eight rows. Centroids are in the tokens' 16-bit type, and
// half_norms are those of the rounded ones.
//
// Roles: warp w has rows 64 (w / 4) to + 63 and columns 32 (w % 4) to + 31 of each tile.
// Shared memory: the product's 48 KB; at the end the bests of the four columns of warps.
#pragma once

#include "common/finite.cuh"
#include "common/product.cuh"

namespace tessera {

struct KmeansAssignParams {
  const void* x;            // (heads, x_tokens, 8 chunks) of T, from the first token to be labelled
  const void* centroids;    // (heads, clusters, 8 chunks) of T
  const float* half_norms;  // (heads, clusters)
  i32* labels;              // (heads, x_tokens), from the first token to be labelled
  i32* flag;                // set where x holds NaN or infinities, or null
  i32 x_tokens;             // tokens from one head to the next
  i32 tokens;               // to be labelled
  i32 chunks;               // 16-byte chunks of a token
  i32 clusters;
  i32 tiles;  // ceil(tokens / 128)
};

template <typename T>
__device__ __forceinline__ void kmeans_assign(const KmeansAssignParams& p) {
  extern __shared__ __align__(1024) u8 dynamic_smem[];
  Product<T> product(dynamic_smem);
  constexpr int kTile = Product<T>::kTile;
  const int head = blockIdx.x / static_cast<u32>(p.tiles);
  const int first = static_cast<int>(blockIdx.x % static_cast<u32>(p.tiles)) * kTile;
  const u64 token_bytes = static_cast<u64>(p.chunks) * 16u;
  const u64 x =
      reinterpret_cast<u64>(p.x) + (static_cast<u64>(head) * p.x_tokens + first) * token_bytes;
  const u64 centroids =
      reinterpret_cast<u64>(p.centroids) + static_cast<u64>(head) * p.clusters * token_bytes;
  const float* const half_norms = p.half_norms + static_cast<i64>(head) * p.clusters;

  if (p.flag != nullptr) {
    const i64 count = static_cast<i64>(min(kTile, p.tokens - first)) * p.chunks;
    flag_not_finite<T, Product<T>::kThreads>(reinterpret_cast<const uint4*>(x), count, p.flag);
  }

  ForwardRows a;
  a.at = x + product.copied_row() * token_bytes;
  a.gap = 64 * token_bytes;
#pragma unroll
  for (int i = 0; i < 2; ++i)
    a.left[i] = first + product.copied_row() + 64 * i < p.tokens ? p.chunks : 0;
  a.advance(product.copied_chunk());
  const int slices = (p.chunks + product.kSliceChunks - 1) / product.kSliceChunks;

  float best[8];
  i32 label[8];
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    best[r] = negative_infinity();
    label[r] = 0;
  }
  for (int from = 0; from < p.clusters; from += kTile) {
    ForwardRows b;
    const int row = from + product.copied_row();
    b.at = centroids + row * token_bytes;
    b.gap = 64 * token_bytes;
#pragma unroll
    for (int i = 0; i < 2; ++i) b.left[i] = row + 64 * i < p.clusters ? p.chunks : 0;
    b.advance(product.copied_chunk());
    product.run(slices, a, b);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int c = from + product.column(n) + e;
        if (c >= p.clusters) continue;
        const float half_norm = __ldg(half_norms + c);
#pragma unroll
        for (int r = 0; r < 8; ++r) {
          const float value = product.c[r >> 1][n][2 * (r & 1) + e] - half_norm;
          // Columns come in rising order, so the lower one of equals stays.
          if (value > best[r]) {
            best[r] = value;
            label[r] = c;
          }
        }
      }
    }
  }

  // Of the four lanes of a row, then of the four warps.
  float* const bests = reinterpret_cast<float*>(dynamic_smem);
  i32* const labels = reinterpret_cast<i32*>(dynamic_smem) + 4 * kTile;
  auto take = [](float& value, i32& index, float other, i32 other_index) {
    if (other > value || (other == value && other_index < index)) {
      value = other;
      index = other_index;
    }
  };
#pragma unroll
  for (int r = 0; r < 8; ++r) {
#pragma unroll
    for (int lane = 1; lane < 4; lane *= 2) {
      const float other = __shfl_xor_sync(~0u, best[r], lane);
      const i32 other_label = __shfl_xor_sync(~0u, label[r], lane);
      take(best[r], label[r], other, other_label);
    }
    if ((product.lane & 3) == 0) {
      const int at = (product.warp & 3) * kTile + product.row(r >> 1, r & 1);
      bests[at] = best[r];
      labels[at] = label[r];
    }
  }
  __syncthreads();
  const int row = product.thread;
  if (row >= kTile || first + row >= p.tokens) return;
  float value = bests[row];
  i32 index = labels[row];
#pragma unroll
  for (int i = 1; i < 4; ++i) take(value, index, bests[i * kTile + row], labels[i * kTile + row]);
  p.labels[static_cast<i64>(head) * p.x_tokens + first + row] = index;
}

}  // namespace tessera

// The one entry of a specialisation.
#define TESSERA_KMEANS_ASSIGN(T, WARPS, MIN_CTAS)                                              \
  static_assert(WARPS == tessera::Product<tessera::T>::kWarps, "the product has eight warps"); \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)                           \
      kmeans_assign(const __grid_constant__ tessera::KmeansAssignParams params) {              \
    tessera::kmeans_assign<tessera::T>(params);                                                \
  }
