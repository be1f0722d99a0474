// Which blocks are alike, as weights: out[i] = 1 where alike[i] exceeds the similarity, else 0.
#pragma once

#include "common/types.cuh"

namespace tessera {

struct AlikeWeightsParams {
  const float* alike;
  float* out;
  i32 count;
  float similarity;
};

template <int kWarps>
__device__ __forceinline__ void alike_weights(const AlikeWeightsParams& p) {
  const int i = blockIdx.x * (kWarps * 32) + threadIdx.x;
  if (i < p.count) p.out[i] = __ldg(p.alike + i) > p.similarity ? 1.0f : 0.0f;
}

}  // namespace tessera

// The one entry of a specialisation.
#define TESSERA_ALIKE_WEIGHTS(WARPS, MIN_CTAS)                                    \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)              \
      alike_weights(const __grid_constant__ tessera::AlikeWeightsParams params) { \
    tessera::alike_weights<WARPS>(params);                                        \
  }
