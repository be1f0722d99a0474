// Tokens without their head's mean: out[t, c] = x[t, c] - mean[c], rounded to x's type.
//
// CTAs walk over a head's 16-byte chunks; blockIdx.y is the head. No shared memory. Expected on an
// H200, a prediction: the bytes' time, 57,600 tokens x 40 heads x 128 x 2 read and written, 0.3 ms.
#pragma once

#include "common/ptx.cuh"
#include "common/types.cuh"
#include "common/widen.cuh"

namespace tessera {

struct CentreTokensParams {
  const uint4* x;     // (heads, tokens, chunks)
  const float* mean;  // (heads, channels)
  uint4* out;
  i64 count;  // chunks of a head
  i32 chunks;
  i32 channels;  // the rest of a row is zeros
};

template <typename T>
__device__ __forceinline__ u32 less(u32 pair, float low, float high) {
  return pack2<T>(widened<T>(pair & 0xffffu) - low, widened<T>(pair >> 16) - high);
}

template <typename T, int kWarps>
__device__ __forceinline__ void centre_tokens(const CentreTokensParams& p) {
  const i64 head = blockIdx.y;
  const float* const mean = p.mean + head * p.channels;
  for (i64 i = blockIdx.x * (kWarps * 32) + threadIdx.x; i < p.count;
       i += gridDim.x * (kWarps * 32)) {
    const int first = static_cast<int>(i % p.chunks) * 8;
    float m[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) m[c] = first + c < p.channels ? __ldg(mean + first + c) : 0.0f;
    const uint4 v = __ldg(p.x + head * p.count + i);
    p.out[head * p.count + i] = make_uint4(less<T>(v.x, m[0], m[1]), less<T>(v.y, m[2], m[3]),
                                           less<T>(v.z, m[4], m[5]), less<T>(v.w, m[6], m[7]));
  }
}

}  // namespace tessera

// The one entry of a specialisation.
#define TESSERA_CENTRE_TOKENS(T, WARPS, MIN_CTAS)                                 \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)              \
      centre_tokens(const __grid_constant__ tessera::CentreTokensParams params) { \
    tessera::centre_tokens<tessera::T, WARPS>(params);                            \
  }
