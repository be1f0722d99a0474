// Each head's route: the pattern under which its sampled queries come closer to dense attention.
//
//   error[head, r] = sum over rows and channels of (O_r - O_dense)^2,  r = 0, 1
//   route[head] = 1 where error[head, 1] < error[head, 0], else 0
//
// o is (heads, 3, rows, head_dim): dense, pattern 0, pattern 1; the rows of pattern 1 are in an
// order of their own, row i of it is row places[i] of the others. A CTA a head, 16 bytes a thread;
// sums are taken in one fixed order, so that a route is repeatable. Shared memory: two sums a warp.
//
// Expected on an H200, a prediction: 40 heads x 3 x 768 x 128 x 2 bytes, 24 MB by 40 CTAs of 1,024
// threads with 16 KB in flight each, 7 us.
#pragma once

#include "common/builders.cuh"
#include "common/ptx.cuh"
#include "common/types.cuh"

namespace tessera {

struct RouteHeadsParams {
  const void* o;      // contiguous, on 16 bytes
  const i32* places;  // (rows)
  i32* route;         // (heads)
  float* errors;      // (heads, 2)
  i32 rows;
  i32 head_dim;  // a multiple of 8
};

// Sum of squared differences of eight elements.
template <typename T>
__device__ __forceinline__ float squares(const uint4& a, const uint4& b) {
  const u32 left[4] = {a.x, a.y, a.z, a.w};
  const u32 right[4] = {b.x, b.y, b.z, b.w};
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x;
      float y;
      if constexpr (is_same<T, bf16_t>) {
        x = __uint_as_float(half ? left[i] & 0xffff0000u : left[i] << 16);
        y = __uint_as_float(half ? right[i] & 0xffff0000u : right[i] << 16);
      } else {
        x = half_to_float(left[i] >> (16 * half) & 0xffffu);
        y = half_to_float(right[i] >> (16 * half) & 0xffffu);
      }
      sum += (x - y) * (x - y);
    }
  }
  return sum;
}

template <typename T, int kWarps>
__device__ __forceinline__ void route_heads(const RouteHeadsParams& p) {
  static __shared__ float sums[2][kWarps];
  const int head = blockIdx.x;
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  const i64 all = static_cast<i64>(p.rows) * p.head_dim / 8;  // vectors of one of the three
  const int in_row = p.head_dim / 8;
  const uint4* const dense = static_cast<const uint4*>(p.o) + 3 * head * all;
  float error[2] = {};
  for (i64 i = threadIdx.x; i < all; i += 32 * kWarps) {
    const i64 row = i / in_row;
    const i64 place = p.places[row] * static_cast<i64>(in_row) + (i - row * in_row);
    error[0] += squares<T>(dense[all + i], dense[i]);
    error[1] += squares<T>(dense[2 * all + i], dense[place]);
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
