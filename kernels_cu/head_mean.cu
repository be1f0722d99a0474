// The mean over all tokens of a head from the means of its blocks, the last of which may be short.
//
// One CTA a head. A warp adds up every few blocks, a lane every 32nd channel, and the warps' sums
// are added in their order. Shared memory: a float a warp and channel.
#pragma once

#include "common/types.cuh"

namespace tessera {

struct HeadMeanParams {
  const float* means;  // (heads, blocks, channels)
  float* out;          // (heads, channels)
  i32 tokens;
  i32 block;  // tokens of all blocks but the last
  i32 blocks;
  i32 channels;  // at most 256
};

template <int kWarps>
__device__ __forceinline__ void head_mean(const HeadMeanParams& p) {
  extern __shared__ __align__(1024) u8 dynamic_smem[];
  constexpr int kParts = 8;
  float* const sums = reinterpret_cast<float*>(dynamic_smem);  // [warps][channels]
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  const float* const means = p.means + static_cast<i64>(blockIdx.x) * p.blocks * p.channels;

  float sum[kParts] = {};
#pragma unroll 2
  for (int block = warp; block < p.blocks; block += kWarps) {
    const float size = static_cast<float>(min(p.block, p.tokens - block * p.block));
    const float* const mean = means + static_cast<i64>(block) * p.channels;
#pragma unroll
    for (int i = 0; i < kParts; ++i)
      if (lane + 32 * i < p.channels) sum[i] += size * __ldg(mean + lane + 32 * i);
  }
#pragma unroll
  for (int i = 0; i < kParts; ++i)
    if (lane + 32 * i < p.channels) sums[warp * p.channels + lane + 32 * i] = sum[i];
  __syncthreads();
  for (int c = threadIdx.x; c < p.channels; c += kWarps * 32) {
    float total = 0.0f;
    for (int w = 0; w < kWarps; ++w) total += sums[w * p.channels + c];
    p.out[static_cast<i64>(blockIdx.x) * p.channels + c] = total / static_cast<float>(p.tokens);
  }
}

}  // namespace tessera

// The one entry of a specialisation.
#define TESSERA_HEAD_MEAN(WARPS, MIN_CTAS)                                \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)      \
      head_mean(const __grid_constant__ tessera::HeadMeanParams params) { \
    tessera::head_mean<WARPS>(params);                                    \
  }
