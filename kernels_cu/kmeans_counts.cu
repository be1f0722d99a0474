// How many tokens of each part of a head have each label, for kmeans_order.cu.
//
// One CTA a part of a head (common/labels.cuh). Shared memory: 16 bits for each warp and label.
//
// Expected on an H200, a prediction, for 57,600 tokens x 8 heads: 120 CTAs, a read of the labels
// and 8 rounds of 12 ballots: 2 us and the launch.
#pragma once

#include "common/labels.cuh"
#include "common/types.cuh"

namespace tessera {

struct KmeansCountsParams {
  const i32* labels;  // (heads, tokens), 0 to clusters - 1
  u16* counts;        // (heads, parts, clusters)
  i32 tokens;
  i32 clusters;
  i32 label_bits;  // 2^label_bits >= clusters
  i32 parts;
};

template <int kWarps>
__device__ __forceinline__ void kmeans_counts(const KmeansCountsParams& p) {
  extern __shared__ __align__(1024) u8 dynamic_smem[];
  u16* const counts = reinterpret_cast<u16*>(dynamic_smem);  // [warps][clusters]
  const i64 head = blockIdx.x / static_cast<u32>(p.parts);
  const int part = blockIdx.x % static_cast<u32>(p.parts);
  PartLabels<kWarps> own(part, p.label_bits);
  own.read(p.labels + head * p.tokens, p.tokens);
  own.count(p.clusters, p.label_bits, counts + (threadIdx.x >> 5) * p.clusters);
  __syncthreads();
  u16* const out = p.counts + static_cast<i64>(blockIdx.x) * p.clusters;
#pragma unroll 1
  for (int label = threadIdx.x; label < p.clusters; label += kWarps * 32) {
    u32 sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += counts[w * p.clusters + label];
    out[label] = static_cast<u16>(sum);
  }
}

}  // namespace tessera

// The one entry of a specialisation.
#define TESSERA_KMEANS_COUNTS(WARPS, MIN_CTAS)                                    \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)              \
      kmeans_counts(const __grid_constant__ tessera::KmeansCountsParams params) { \
    tessera::kmeans_counts<WARPS>(params);                                        \
  }
