// The mean of each cluster's tokens, and what the next assignment needs of it; an empty cluster
// keeps its centroid. Or, to begin with, tokens at even distances in place of means.
//
// One CTA a cluster. A thread adds up one 16-byte chunk of every few of its tokens, in the order of
// the sort, and the sums of a channel are added in the order of the threads: the result does not
// depend on who comes first. Tokens are read kBatch at a time, so that a cluster of the usual size
// waits for memory three times: its size, its tokens' places, the tokens.
//
// Shared memory: the sums, 8 rows of one for each thread, and the means.
//
// Expected on an H200, a prediction, for 57,600 tokens x 8 heads x 128 and 1,000 clusters: 118 MB
// at 3.4 TB/s, 35 us; 8,000 CTAs of 3,000 cycles, four on a multiprocessor, take 27 us.
#pragma once

#include "common/finite.cuh"
#include "common/ptx.cuh"
#include "common/types.cuh"
#include "common/widen.cuh"

namespace tessera {

struct KmeansMeansParams {
  const void* x;      // (heads, tokens, 8 chunks) of T
  const i32* order;   // (heads, tokens), by label; not read where all sizes are 0
  const i32* sizes;   // (heads, size_stride), of which the first `clusters` count
  const i32* starts;  // the same
  const float*
      kept;          // (heads, clusters, 8 chunks), centroids of empty clusters; may be those below
  float* centroids;  // (heads, clusters, 8 chunks)
  void* rounded;     // the same in T
  float* half_norms;  // (heads, clusters): |rounded|^2 / 2
  i32* flag;          // set where centroids are NaN or infinities, or null
  i32 tokens;
  i32 chunks;
  i32 clusters;
  i32 size_stride;
  i32 spread;        // clusters of one token each, at even distances of this many; or 0
  i32 spread_start;  // the first of these tokens
};

template <typename T>
__device__ __forceinline__ void add_pair(float (&sum)[8], int i, u32 pair) {
  sum[i] += widened<T>(pair & 0xffffu);
  sum[i + 1] += widened<T>(pair >> 16);
}

template <typename T, int kWarps>
__device__ __forceinline__ void kmeans_means(const KmeansMeansParams& p) {
  extern __shared__ __align__(1024) u8 dynamic_smem[];
  constexpr int kThreads = kWarps * 32;
  constexpr int kBatch = 6;
  // A row of sums: as long as eight rows of a chunk each need to fall into different banks.
  const int row = kThreads + p.chunks;
  float* const sums = reinterpret_cast<float*>(dynamic_smem);  // [8][row]
  float* const means = sums + 8 * row;                         // [chunks][8]
  const int thread = threadIdx.x;
  const i64 head = blockIdx.x / static_cast<u32>(p.clusters);
  const int cluster = blockIdx.x % static_cast<u32>(p.clusters);
  const int size = p.spread ? 1 : __ldg(p.sizes + head * p.size_stride + cluster);
  const int slots = kThreads / p.chunks;
  const int chunk = thread % p.chunks;
  const int slot = thread / p.chunks;

  float sum[8] = {};
  auto add = [&sum](const uint4& v) {
    add_pair<T>(sum, 0, v.x);
    add_pair<T>(sum, 2, v.y);
    add_pair<T>(sum, 4, v.z);
    add_pair<T>(sum, 6, v.w);
  };
  const uint4* const x = static_cast<const uint4*>(p.x) + head * p.tokens * p.chunks + chunk;
  if (p.spread) {
    const i64 chosen = p.spread_start + static_cast<i64>(cluster) * p.spread / p.clusters;
    if (slot == 0) add(__ldg(x + chosen * p.chunks));
  } else if (slot < slots) {
    const i32* const order =
        p.order + head * p.tokens + __ldg(p.starts + head * p.size_stride + cluster);
#pragma unroll 1
    for (int i = slot; i < size; i += kBatch * slots) {
      i32 token[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) token[j] = __ldg(order + min(i + j * slots, size - 1));
      uint4 v[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) v[j] = __ldg(x + static_cast<i64>(token[j]) * p.chunks);
#pragma unroll
      for (int j = 0; j < kBatch; ++j)
        if (i + j * slots < size) add(v[j]);
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) sums[i * row + thread] = sum[i];
  __syncthreads();

  // A thread has a channel; chunks are 32 at most, so there are eight slots.
  if (slot < 8) {
    const i64 at = (head * p.clusters + cluster) * 8 * p.chunks + 8 * chunk + slot;
    float total = 0.0f;
#pragma unroll 8
    for (int s = 0; s < slots; ++s) total += sums[slot * row + s * p.chunks + chunk];
    const float mean = size > 0 ? total / static_cast<float>(size) : p.kept[at];
    if (p.flag != nullptr && !is_finite(mean)) *p.flag = 1;
    p.centroids[at] = mean;
    means[8 * chunk + slot] = mean;
  }
  __syncthreads();

  // Chunks are 32 at most, so they are all the first warp's.
  if (thread >= 32) return;
  float norm = 0.0f;
  if (thread < p.chunks) {
    u32 packed[4];
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      packed[i / 2] = pack2<T>(means[8 * thread + i], means[8 * thread + i + 1]);
      const float low = widened<T>(packed[i / 2] & 0xffffu);
      const float high = widened<T>(packed[i / 2] >> 16);
      norm += low * low + high * high;
    }
    static_cast<uint4*>(p.rounded)[(head * p.clusters + cluster) * p.chunks + thread] =
        make_uint4(packed[0], packed[1], packed[2], packed[3]);
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) norm += __shfl_xor_sync(~0u, norm, distance);
  if (thread == 0) p.half_norms[head * p.clusters + cluster] = 0.5f * norm;
}

}  // namespace tessera

// The one entry of a specialisation.
#define TESSERA_KMEANS_MEANS(T, WARPS, MIN_CTAS)                                \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)            \
      kmeans_means(const __grid_constant__ tessera::KmeansMeansParams params) { \
    tessera::kmeans_means<tessera::T, WARPS>(params);                           \
  }
