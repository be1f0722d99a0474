// Looking for NaN and infinities.
#pragma once

#include "common/types.cuh"

namespace tessera {

// By the bits, as the compiler may take it that there is no NaN.
__device__ __forceinline__ bool is_finite(float value) {
  return (__float_as_uint(value) & 0x7f800000u) != 0x7f800000u;
}

// Whether one of two packed elements has an exponent of ones alone.
template <typename T>
__device__ __forceinline__ bool not_finite(u32 pair) {
  constexpr u32 kExponent = is_same<T, half_t> ? 0x7c00u : 0x7f80u;
  return (pair & kExponent) == kExponent || ((pair >> 16) & kExponent) == kExponent;
}

// Sets *flag if one of `count` 16-byte chunks of 16-bit elements holds no number. The threads of a
// CTA share the work.
template <typename T, int kThreads>
__device__ __forceinline__ void flag_not_finite(const uint4* chunks, i64 count, i32* flag) {
  bool found = false;
  for (i64 i = threadIdx.x; i < count; i += kThreads) {
    const uint4 v = __ldg(chunks + i);
    found = found || not_finite<T>(v.x) || not_finite<T>(v.y) || not_finite<T>(v.z) ||
            not_finite<T>(v.w);
  }
  if (found) *flag = 1;
}

}  // namespace tessera
