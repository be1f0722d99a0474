// The mean of each cluster's tokens, and what the next assignment needs of it; an empty cluster
// keeps its centroid. Or, to begin with, tokens at even distances in place of means.
//
// One CTA a cluster. A thread adds up one 16-byte chunk of every few of its tokens, in the order of
// the sort, and the sums of a chunk are added in the order of the threads: the result does not
// depend on who comes first. Shared memory: 8 floats a thread.
#pragma once

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
  float* const sums = reinterpret_cast<float*>(dynamic_smem);  // [8][threads]
  const int thread = threadIdx.x;
  const i64 head = blockIdx.x / static_cast<u32>(p.clusters);
  const int cluster = blockIdx.x % static_cast<u32>(p.clusters);
  const int size = p.spread ? 1 : __ldg(p.sizes + head * p.size_stride + cluster);
  const int slots = kThreads / p.chunks;
  const int chunk = thread % p.chunks;
  const int slot = thread / p.chunks;

  float sum[8] = {};
  if (size > 0 && slot < slots) {
    const i64 begin = p.spread ? 0 : __ldg(p.starts + head * p.size_stride + cluster);
    const i32* const order = p.order + head * p.tokens + begin;
    const uint4* const x = static_cast<const uint4*>(p.x) + head * p.tokens * p.chunks + chunk;
    const i64 chosen = p.spread_start + static_cast<i64>(cluster) * p.spread / p.clusters;
#pragma unroll 4
    for (int i = slot; i < size; i += slots) {
      const i64 token = p.spread ? chosen : __ldg(order + i);
      const uint4 v = __ldg(x + token * p.chunks);
      add_pair<T>(sum, 0, v.x);
      add_pair<T>(sum, 2, v.y);
      add_pair<T>(sum, 4, v.z);
      add_pair<T>(sum, 6, v.w);
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) sums[i * kThreads + thread] = sum[i];
  __syncthreads();

  float norm = 0.0f;
  if (thread < p.chunks) {
    const i64 at = (head * p.clusters + cluster) * p.chunks + thread;
    const float* const kept = p.kept + 8 * at;
    float* const centroid = p.centroids + 8 * at;
    u32 packed[4];
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      float pair[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float total = 0.0f;
        for (int s = 0; s < slots; ++s) total += sums[(i + e) * kThreads + s * p.chunks + thread];
        pair[e] = size > 0 ? total / static_cast<float>(size) : kept[i + e];
        centroid[i + e] = pair[e];
      }
      packed[i / 2] = pack2<T>(pair[0], pair[1]);
      const float low = widened<T>(packed[i / 2] & 0xffffu);
      const float high = widened<T>(packed[i / 2] >> 16);
      norm += low * low + high * high;
    }
    static_cast<uint4*>(p.rounded)[at] = make_uint4(packed[0], packed[1], packed[2], packed[3]);
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) norm += __shfl_xor_sync(~0u, norm, distance);
  // Chunks are 32 at most, so they are all the first warp's.
  if (thread == 0) p.half_norms[head * p.clusters + cluster] = 0.5f * norm;
}

}  // namespace tessera

// The one entry of a specialisation.
#define TESSERA_KMEANS_MEANS(T, WARPS, MIN_CTAS)                                \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)            \
      kmeans_means(const __grid_constant__ tessera::KmeansMeansParams params) { \
    tessera::kmeans_means<tessera::T, WARPS>(params);                           \
  }
