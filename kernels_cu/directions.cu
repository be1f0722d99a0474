// Pooled queries and keys into those whose products rank tiles for SSTA, in place: keys get length
// 1, and with S the sum of the keys of video tiles, queries become
//
//   balance * q / |q| - share * S
//
// Keys outside the video become NaN, which ranks below all.
//
// One CTA a head: first a warp a row, then, 32 channels at a time, a lane a channel. The partial
// sums of S are added in the order of the warps, so that runs agree to the last bit. Shared memory:
// 32 floats a warp.
//
// Expected on an H200, a prediction: rows are read from L2 three times and written twice. 360 tiles
// x 128 channels are 0.4 MB a head, some 10 us; 1,744 tiles of 64 tokens about 50 us.
#pragma once

#include "common/types.cuh"

namespace tessera {

struct DirectionsParams {
  float* queries;  // (heads, blocks, channels)
  float* keys;     // the same
  i32 blocks;
  i32 channels;
  i32 first;  // of the video's blocks
  i32 count;
  float balance;
  float share;
};

// The row gets the length `length`. A row without a direction stays next to zero.
__device__ __forceinline__ void set_length(float* row, int channels, float length) {
  const int lane = threadIdx.x & 31;
  float squares = 0.0f;
  for (int c = lane; c < channels; c += 32) squares += row[c] * row[c];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    squares += __shfl_xor_sync(~0u, squares, distance);
  const float factor = length / fmaxf(sqrtf(squares), 1e-12f);
  for (int c = lane; c < channels; c += 32) row[c] *= factor;
}

template <int kWarps>
__device__ __forceinline__ void directions(const DirectionsParams& p) {
  extern __shared__ __align__(1024) u8 dynamic_smem[];
  float* const sums = reinterpret_cast<float*>(dynamic_smem);  // [kWarps][32]
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  const int channels = p.channels;
  const int end = p.first + p.count;
  const i64 head = static_cast<i64>(blockIdx.x) * p.blocks * channels;
  float* const queries = p.queries + head;
  float* const keys = p.keys + head;

  for (int row = warp; row < p.blocks; row += kWarps) {
    const i64 at = static_cast<i64>(row) * channels;
    set_length(queries + at, channels, p.balance);
    if (row >= p.first && row < end) {
      set_length(keys + at, channels, 1.0f);
    } else {
      for (int c = lane; c < channels; c += 32) keys[at + c] = __uint_as_float(0x7fffffffu);
    }
  }
  for (int first = 0; first < channels; first += 32) {
    const int c = first + lane;
    __syncthreads();  // rows are written; the sums before were read
    float sum = 0.0f;
    if (c < channels) {
#pragma unroll 4
      for (int row = p.first + warp; row < end; row += kWarps)
        sum += keys[static_cast<i64>(row) * channels + c];
    }
    sums[warp * 32 + lane] = sum;
    __syncthreads();
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += sums[w * 32 + lane];
    total *= p.share;
    if (c < channels) {
#pragma unroll 4
      for (int row = warp; row < p.blocks; row += kWarps)
        queries[static_cast<i64>(row) * channels + c] -= total;
    }
  }
}

}  // namespace tessera

// The one entry of a specialisation.
#define TESSERA_DIRECTIONS(WARPS, MIN_CTAS)                                  \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)         \
      directions(const __grid_constant__ tessera::DirectionsParams params) { \
    tessera::directions<WARPS>(params);                                      \
  }
