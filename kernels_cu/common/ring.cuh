// A walk over the stages of a pipeline.
#pragma once

#include "common/types.cuh"

namespace tessera {

// A ring's next stage, and how often the ring came round.
template <int kStages>
struct RingPlace {
  u32 stage = 0;
  u32 phase = 0;

  __device__ __forceinline__ void next() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1u;
    }
  }
};

}  // namespace tessera
