// 16-bit elements as float32, by their bits.
#pragma once

#include "common/ptx.cuh"
#include "common/types.cuh"

namespace tessera {

// The element in the low 16 bits.
template <typename T>
__device__ __forceinline__ float widened(u32 bits) {
  if constexpr (is_same<T, half_t>) {
    return half_to_float(bits & 0xffffu);
  } else {
    return __uint_as_float(bits << 16);
  }
}

}  // namespace tessera
