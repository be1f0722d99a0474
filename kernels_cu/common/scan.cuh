// Sums over the threads of a CTA.
#pragma once

#include "common/builders.cuh"

namespace tessera {

// The sum of the values of all lower threads. `totals` has an element a warp; all threads call, and
// what they wrote to shared memory before is visible afterwards.
template <int kWarps>
__device__ __forceinline__ i32 sum_before(i32 value, i32* totals) {
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  i32 sum = value;  // then with all lower lanes'
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const i32 other = __shfl_sync(kAllLanes, sum, lane - distance);
    if (lane >= distance) sum += other;
  }
  if (lane == 31) totals[warp] = sum;
  __syncthreads();
  i32 before = sum - value;
  for (int w = 0; w < warp; ++w) before += totals[w];
  return before;
}

}  // namespace tessera
