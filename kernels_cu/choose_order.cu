// The order of tokens that each head takes: of its candidates, the one with the largest mean
// likeness over the blocks. Ties fall to the first, and so do planes without numbers.
//
// A CTA a plane, a warp a candidate; sums have a fixed order. Shared memory: a float and an index a
// warp. Expected on an H200, a prediction: 3 us, of which most is the launch: 8 x 6 x 900 floats.
#pragma once

#include "common/ptx.cuh"
#include "common/types.cuh"

namespace tessera {

struct ChooseOrderParams {
  const float* alike;  // (planes, candidates, blocks)
  i32* choice;         // (planes,)
  i32 candidates;
  i32 blocks;
};

template <int kWarps>
__device__ __forceinline__ void choose_order(const ChooseOrderParams& p) {
  static __shared__ float best[kWarps];
  static __shared__ int place[kWarps];
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  float top = negative_infinity();
  int chosen = 0;
  for (int candidate = warp; candidate < p.candidates; candidate += kWarps) {
    const float* const alike =
        p.alike + (static_cast<i64>(blockIdx.x) * p.candidates + candidate) * p.blocks;
    float sum = 0.0f;
    for (int block = lane; block < p.blocks; block += 32) sum += __ldg(alike + block);
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
    if (sum > top) {
      top = sum;
      chosen = candidate;
    }
  }
  if (lane == 0) {
    best[warp] = top;
    place[warp] = chosen;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int other = 1; other < kWarps; ++other) {
    if (best[other] > top || (best[other] == top && place[other] < chosen)) {
      top = best[other];
      chosen = place[other];
    }
  }
  p.choice[blockIdx.x] = chosen;
}

}  // namespace tessera

// The one entry of a specialisation.
#define TESSERA_CHOOSE_ORDER(WARPS, MIN_CTAS)                                   \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)            \
      choose_order(const __grid_constant__ tessera::ChooseOrderParams params) { \
    tessera::choose_order<WARPS>(params);                                       \
  }
