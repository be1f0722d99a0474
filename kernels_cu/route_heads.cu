// Each head's route: the pattern under which its sampled queries come closer to dense attention.
//
// The keys of a query are in four classes, 0: of both patterns, 1: of pattern 0 alone, 2: of
// pattern 1 alone, 3: of neither. With O_c and L_c, the attention over class c and its LSE,
//
//   O_S = sum of e^L_c O_c / sum of e^L_c  over the classes c of a set S
//   error[head, r] = sum over rows and channels of (O_r - O_all)^2,  O_0 of {0, 1}, O_1 of {0, 2}
//   route[head] = 1 where error[head, 1] < error[head, 0], else 0
//
// so that each product of a query and a key is computed once. A CTA a head, eight channels a
// thread; sums are taken in one fixed order, so that a route is repeatable. Shared memory: two sums
// a warp.
//
// Expected on an H200, a prediction: 40 heads x 5 x 640 x 128 x 2 bytes, 33 MB by 40 CTAs of 512
// threads with 40 KB in flight each, 17 us.
#pragma once

#include "common/builders.cuh"
#include "common/ptx.cuh"
#include "common/types.cuh"
#include "common/widen.cuh"

namespace tessera {

inline constexpr int kClasses = 5;
inline constexpr float kLog2E = 1.4426950408889634f;

struct RouteHeadsParams {
  const void* o;     // (heads, kClasses, rows, head_dim), contiguous, on 16 bytes
  const float* lse;  // (heads, kClasses, rows); -inf where a class has no keys
  i32* route;        // (heads)
  float* errors;     // (heads, 2)
  i32 rows;
  i32 head_dim;  // a multiple of 8
};

template <typename T, int kWarps>
__device__ __forceinline__ void route_heads(const RouteHeadsParams& p) {
  static __shared__ float sums[2][kWarps];
  const int head = blockIdx.x;
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  const int in_row = p.head_dim / 8;
  const i64 all = static_cast<i64>(p.rows) * in_row;  // vectors of a class
  const uint4* const o = static_cast<const uint4*>(p.o) + kClasses * head * all;
  const float* const lse = p.lse + static_cast<i64>(kClasses) * head * p.rows;
  float error[2] = {};
  for (i64 i = threadIdx.x; i < all; i += 32 * kWarps) {
    const i64 row = i / in_row;
    u32 pairs[kClasses][4];
    float lse_of[kClasses];
#pragma unroll
    for (int c = 0; c < kClasses; ++c) {
      const uint4 vector = o[c * all + i];
      pairs[c][0] = vector.x;
      pairs[c][1] = vector.y;
      pairs[c][2] = vector.z;
      pairs[c][3] = vector.w;
      lse_of[c] = lse[c * p.rows + row];
    }
    // Each set of classes by its own largest LSE: keys far below those of all others count in
    // theirs.
    float of_all[kClasses];
    float top = lse_of[0];
#pragma unroll
    for (int c = 1; c < kClasses; ++c) top = fmaxf(top, lse_of[c]);
    float all_weights = 0.0f;
#pragma unroll
    for (int c = 0; c < kClasses; ++c) {
      of_all[c] = exp2_approx((lse_of[c] - top) * kLog2E);
      all_weights += of_all[c];
    }
#pragma unroll
    for (int c = 0; c < kClasses; ++c) of_all[c] /= all_weights;
    float of_pattern[2][2];  // both patterns' keys, and those of one alone
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float high = fmaxf(lse_of[0], lse_of[1 + r]);
      const float both = exp2_approx((lse_of[0] - high) * kLog2E);
      const float alone = exp2_approx((lse_of[1 + r] - high) * kLog2E);
      of_pattern[r][0] = both / (both + alone);
      of_pattern[r][1] = alone / (both + alone);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float value[kClasses];
      float dense = 0.0f;
#pragma unroll
      for (int c = 0; c < kClasses; ++c) {
        value[c] = widened<T>(pairs[c][j / 2] >> 16 * (j & 1));
        dense += of_all[c] * value[c];
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float off = of_pattern[r][0] * value[0] + of_pattern[r][1] * value[1 + r] - dense;
        error[r] += off * off;
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int other = 16; other > 0; other /= 2) {
      error[r] += __shfl_xor_sync(kAllLanes, error[r], other);
    }
    if (lane == 0) sums[r][warp] = error[r];
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    float total[2] = {};
    for (int r = 0; r < 2; ++r) {
      for (int w = 0; w < kWarps; ++w) total[r] += sums[r][w];
      p.errors[2 * head + r] = total[r];
    }
    p.route[head] = total[1] < total[0] ? 1 : 0;
  }
}

}  // namespace tessera

// The one entry of a specialisation.
#define TESSERA_ROUTE_HEADS(T, WARPS, MIN_CTAS)                               \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)          \
      route_heads(const __grid_constant__ tessera::RouteHeadsParams params) { \
    tessera::route_heads<tessera::T, WARPS>(params);                          \
  }
