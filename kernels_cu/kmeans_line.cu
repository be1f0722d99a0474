// Centroids in the order of a line, so that clusters with neighbouring numbers are alike: by rising
// projection on the direction in which they spread most, equals by their number. With C the
// centroids less their mean, one row each, the direction is v after kTurns turns of
//
//   w = C' (C v),  v = w / max |w|
//
// from a fixed start; where w is 0, so are all projections. What is no finite number counts as 0.
//
// One CTA a head; a warp takes a row at a time, a lane every 32nd channel. Sums are added in the
// order of the rows of a warp and then of the warps, so that runs agree to the last bit. Shared
// memory: 256 floats a warp, 256 more, and one a cluster.
//
// Expected on an H200, a prediction: 1,000 centroids x 128 channels are read from L2 kTurns + 3
// times, some 7 us each, 80 us in all; 50 iterations of k-means take 35 ms.
#pragma once

#include "common/builders.cuh"
#include "common/finite.cuh"
#include "common/types.cuh"

namespace tessera {

struct KmeansLineParams {
  const float* centroids;  // (heads, clusters, channels)
  float* ordered;          // the same
  i32 clusters;
  i32 channels;  // 256 at most
};

constexpr int kLineChannels = 256;
constexpr int kTurns = 8;

// Between -1 and 1, alike to no direction that data have: steps of the golden ratio.
__device__ __forceinline__ float line_start(int channel) {
  const u32 step = (static_cast<u32>(channel) + 1u) * 2654435769u;
  return static_cast<float>(step >> 8) * (1.0f / 8388608.0f) - 1.0f;
}

template <int kWarps>
__device__ __forceinline__ void kmeans_line(const KmeansLineParams& p) {
  extern __shared__ __align__(1024) u8 dynamic_smem[];
  constexpr int kOwn = kLineChannels / 32;                     // channels of a lane
  float* const sums = reinterpret_cast<float*>(dynamic_smem);  // [kWarps][256]
  float* const totals = sums + kWarps * kLineChannels;         // [256]
  float* const places = totals + kLineChannels;                // [clusters]
  const int thread = threadIdx.x;
  const int lane = thread & 31;
  const int warp = thread >> 5;
  const i64 head = static_cast<i64>(blockIdx.x) * p.clusters * p.channels;
  const float* const centroids = p.centroids + head;
  float* const ordered = p.ordered + head;

  float mean[kOwn] = {};
  // A row less the mean; channels that there are not are 0.
  auto read = [&](int row, float (&x)[kOwn]) {
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      const int c = 32 * j + lane;
      const bool there = c < p.channels;
      x[j] = there ? __ldg(centroids + static_cast<i64>(row) * p.channels + c) - mean[j] : 0.0f;
    }
  };
  auto product = [&](const float (&x)[kOwn], const float (&y)[kOwn]) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kOwn; ++j) sum += x[j] * y[j];
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
      sum += __shfl_xor_sync(kAllLanes, sum, distance);
    return sum;
  };
  // The sums over all warps, for each of them.
  auto over_warps = [&](float (&x)[kOwn]) {
#pragma unroll
    for (int j = 0; j < kOwn; ++j) sums[warp * kLineChannels + 32 * j + lane] = x[j];
    __syncthreads();
    if (thread < kLineChannels) {
      float total = 0.0f;
      for (int w = 0; w < kWarps; ++w) total += sums[w * kLineChannels + thread];
      totals[thread] = total;
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kOwn; ++j) x[j] = totals[32 * j + lane];
  };

  float sum[kOwn] = {};
#pragma unroll 2
  for (int row = warp; row < p.clusters; row += kWarps) {
    float x[kOwn];
    read(row, x);
#pragma unroll
    for (int j = 0; j < kOwn; ++j) sum[j] += x[j];
  }
  over_warps(sum);
#pragma unroll
  for (int j = 0; j < kOwn; ++j) mean[j] = sum[j] / static_cast<float>(p.clusters);

  float direction[kOwn];
#pragma unroll
  for (int j = 0; j < kOwn; ++j) direction[j] = line_start(32 * j + lane);
#pragma unroll 1
  for (int turn = 0; turn < kTurns; ++turn) {
    float next[kOwn] = {};
#pragma unroll 2
    for (int row = warp; row < p.clusters; row += kWarps) {
      float x[kOwn];
      read(row, x);
      const float along = product(x, direction);
#pragma unroll
      for (int j = 0; j < kOwn; ++j) next[j] += along * x[j];
    }
    over_warps(next);
    float most = 0.0f;
#pragma unroll
    for (int j = 0; j < kOwn; ++j) most = fmaxf(most, fabsf(next[j]));
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
      most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, distance));
#pragma unroll
    for (int j = 0; j < kOwn; ++j) direction[j] = most > 0.0f ? next[j] / most : 0.0f;
  }

#pragma unroll 2
  for (int row = warp; row < p.clusters; row += kWarps) {
    float x[kOwn];
    read(row, x);
    const float along = product(x, direction);
    if (lane == 0) places[row] = is_finite(along) ? along : 0.0f;
  }
  __syncthreads();
#pragma unroll 1
  for (int row = warp; row < p.clusters; row += kWarps) {
    const float own = places[row];
    int before = 0;
    for (int other = lane; other < p.clusters; other += 32)
      before += places[other] < own || (places[other] == own && other < row);
    const i64 to = static_cast<i64>(__reduce_add_sync(kAllLanes, before)) * p.channels;
    for (int c = lane; c < p.channels; c += 32)
      ordered[to + c] = centroids[static_cast<i64>(row) * p.channels + c];
  }
}

}  // namespace tessera

// The one entry of a specialisation.
#define TESSERA_KMEANS_LINE(WARPS, MIN_CTAS)                                  \
  static_assert(32 * WARPS >= tessera::kLineChannels, "a thread a channel");  \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)          \
      kmeans_line(const __grid_constant__ tessera::KmeansLineParams params) { \
    tessera::kmeans_line<WARPS>(params);                                      \
  }
