// 16-bit elements as float32, by their bits.
#pragma once

#include "common/types.cuh"

namespace tessera {

template <typename T>
__device__ __forceinline__ float widened(u32 bits) {
  if constexpr (is_same<T, half_t>) {
    // Subnormals too: the mantissa moves to its place, and the scale mends the exponent's bias.
    const float size = __uint_as_float((bits & 0x7fffu) << 13) * 5.192296858534828e33f;  // 2^112
    const float value =
        (bits & 0x7c00u) == 0x7c00u ? __uint_as_float(0x7f800000u | (bits & 0x3ffu) << 13) : size;
    return __uint_as_float(__float_as_uint(value) | (bits & 0x8000u) << 16);
  } else {
    return __uint_as_float(bits << 16);
  }
}

}  // namespace tessera
