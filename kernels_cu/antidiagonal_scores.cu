// Scores of strided anti-diagonals, and their sums over key blocks (XAttention, arXiv 2503.16428).
//
//   s[g, h] = scale * sum_i q[S g + S - 1 - i] . k[S h + i],   i = 0 .. S - 1
//   out[g, j] = log2 sum_h 2^s[g, h]   over the groups h of key block j
//
// for groups g, h of S neighbouring tokens; tokens past the last are zeros. One CTA makes 128 x 128
// of s (common/product.cuh) and reduces each row's 8 or 16 columns of a block in registers, so s
// itself is never stored: a block of 128 tokens is one or two column tiles of an mma. Softmax over
// a row needs no more than `out` (antidiagonal_sums.cu).
//
// Roles: warp w has rows 64 (w / 4) to + 63 and columns 32 (w % 4) to + 31 of the tile.
// Shared memory: the product's 48 KB.
#pragma once

#include "common/finite.cuh"
#include "common/product.cuh"

namespace tessera {

struct AntidiagonalScoresParams {
  const void* q;  // (heads, tokens, 8 chunks) of T
  const void* k;
  float* out;   // (heads, groups, blocks)
  i32* q_flag;  // set where q holds NaN or infinities, or null
  i32* k_flag;
  i32 tokens;
  i32 chunks;        // 16-byte chunks of a token
  i32 stride;        // S
  i32 groups;        // ceil(tokens / S)
  i32 blocks;        // ceil(groups / block_groups)
  i32 block_groups;  // 8 or 16
  i32 tiles;         // ceil(groups / 128)
  float scale_log2;
};

// Looks for what is no number in the tokens of the groups of a tile; none where `first` is
// negative.
template <typename T>
__device__ __forceinline__ void flag_tokens(const AntidiagonalScoresParams& p, const void* x,
                                            i32* flag, u64 of_head, int first) {
  if (flag == nullptr || first < 0) return;
  const int begin = first * p.stride;
  const int count = min(Product<T>::kTile * p.stride, p.tokens - begin);
  const auto* const chunks = reinterpret_cast<const uint4*>(reinterpret_cast<u64>(x) + of_head);
  flag_not_finite<T, Product<T>::kThreads>(chunks + static_cast<i64>(begin) * p.chunks,
                                           static_cast<i64>(count) * p.chunks, flag);
}

template <typename T>
__device__ __forceinline__ void antidiagonal_scores(const AntidiagonalScoresParams& p) {
  extern __shared__ __align__(1024) u8 dynamic_smem[];
  Product<T> product(dynamic_smem);
  const u32 tile = blockIdx.x % static_cast<u32>(p.tiles * p.tiles);
  const int head = blockIdx.x / static_cast<u32>(p.tiles * p.tiles);
  const int first_q = static_cast<int>(tile / p.tiles) * product.kTile;
  const int first_k = static_cast<int>(tile % p.tiles) * product.kTile;
  const u64 token_bytes = static_cast<u64>(p.chunks) * 16u;
  const u64 of_head = static_cast<u64>(head) * p.tokens * token_bytes;

  BackwardRows a;
  ForwardRows b;
  const int q_end = (first_q + product.copied_row() + 1) * p.stride;
  const int k_begin = (first_k + product.copied_row()) * p.stride;
  const int gap = 64 * p.stride;  // tokens
  a.at = reinterpret_cast<u64>(p.q) + of_head + (q_end - 1) * token_bytes;
  b.at = reinterpret_cast<u64>(p.k) + of_head + k_begin * token_bytes;
  a.gap = b.gap = gap * token_bytes;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    a.absent[i] = q_end + i * gap - p.tokens;
    b.left[i] = (p.tokens - k_begin - i * gap) * p.chunks;
  }
  a.back = a.chunk = 0;
  a.token_chunks = p.chunks;
  a.advance(product.copied_chunk());
  b.advance(product.copied_chunk());
  flag_tokens<T>(p, p.q, p.q_flag, of_head, first_k == 0 ? first_q : -1);
  flag_tokens<T>(p, p.k, p.k_flag, of_head, first_q == 0 ? first_k : -1);
  product.run(p.stride * p.chunks / product.kSliceChunks, a, b);

  float (&s)[4][4][4] = product.c;
#pragma unroll
  for (int n = 0; n < 4; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool there = first_k + product.column(n) + (e & 1) < p.groups;
#pragma unroll
      for (int m = 0; m < 4; ++m)
        s[m][n][e] = there ? s[m][n][e] * p.scale_log2 : negative_infinity();
    }

  const bool pairs = p.block_groups == 16;
  const int turn = product.lane & 3;  // the column tile, or pair of them, that this lane writes
  const int block = (first_k + (product.warp & 3) * 32) / p.block_groups + turn;
#pragma unroll
  for (int m = 0; m < 4; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top[4];
      float sum[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        top[n] = fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]);
        top[n] = fmaxf(top[n], __shfl_xor_sync(~0u, top[n], 1));
        top[n] = fmaxf(top[n], __shfl_xor_sync(~0u, top[n], 2));
      }
      if (pairs) {
        top[0] = top[1] = fmaxf(top[0], top[1]);
        top[2] = top[3] = fmaxf(top[2], top[3]);
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        // A finite reference where no column is there, lest a difference be NaN.
        const float reference = fmaxf(top[n], -1e30f);
        sum[n] = exp2_approx(s[m][n][2 * half] - reference) +
                 exp2_approx(s[m][n][2 * half + 1] - reference);
        sum[n] += __shfl_xor_sync(~0u, sum[n], 1);
        sum[n] += __shfl_xor_sync(~0u, sum[n], 2);
      }
      if (pairs) {
        sum[0] += sum[1];
        sum[1] = sum[2] + sum[3];
        top[1] = top[2];
      }
      float mine_top = top[0];
      float mine_sum = sum[0];
#pragma unroll
      for (int n = 1; n < 4; ++n) {
        mine_top = turn == n ? top[n] : mine_top;
        mine_sum = turn == n ? sum[n] : mine_sum;
      }
      const int row = first_q + product.row(m, half);
      if (row < p.groups && block < p.blocks && turn < (pairs ? 2 : 4)) {
        p.out[(static_cast<i64>(head) * p.groups + row) * p.blocks + block] =
            mine_top + log2_approx(mine_sum);
      }
    }
  }
}

}  // namespace tessera

// The one entry of a specialisation.
#define TESSERA_ANTIDIAGONAL_SCORES(T, WARPS, MIN_CTAS)                                        \
  static_assert(WARPS == tessera::Product<tessera::T>::kWarps, "the product has eight warps"); \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)                           \
      antidiagonal_scores(const __grid_constant__ tessera::AntidiagonalScoresParams params) {  \
    tessera::antidiagonal_scores<tessera::T>(params);                                          \
  }
