// Tokens sorted by label, stably, and how many have each: a counting sort.
//
// One CTA a part of a head (common/labels.cuh). It counts the labels of its warps again, sums what
// kmeans_counts.cu found for the parts before it and for all, and so knows where the tokens of each
// label of each of its warps begin. Nothing depends on who comes first.
//
// Shared memory: where each label begins, and a count of 16 bits for each warp and label.
//
// Expected on an H200, a prediction, for 57,600 tokens x 8 heads and 1,000 labels: 120 CTAs; two
// reads that do not wait for each other, 30 KB of counts a CTA, 8 rounds of 12 ballots, 8 of
// writes: 6 us and the launch.
#pragma once

#include "common/labels.cuh"
#include "common/scan.cuh"
#include "common/types.cuh"

namespace tessera {

struct KmeansOrderParams {
  const i32* labels;  // (heads, tokens), 0 to clusters - 1
  const u16* counts;  // (heads, parts, clusters)
  i32* order;         // (heads, tokens): tokens by label
  i32* sizes;         // (heads, clusters)
  i32* starts;        // (heads, clusters)
  i32 tokens;
  i32 clusters;
  i32 label_bits;  // 2^label_bits >= clusters
  i32 parts;
};

template <int kWarps>
__device__ __forceinline__ void kmeans_order(const KmeansOrderParams& p) {
  extern __shared__ __align__(1024) u8 dynamic_smem[];
  constexpr int kThreads = kWarps * 32;
  constexpr int kShare = 3;  // labels of a thread; shared memory has room for fewer
  i32* const starts = reinterpret_cast<i32*>(dynamic_smem);     // [clusters]
  i32* const totals = starts + p.clusters;                      // [warps]
  u16* const counts = reinterpret_cast<u16*>(totals + kWarps);  // [warps][clusters]
  const int thread = threadIdx.x;
  const i64 head = blockIdx.x / static_cast<u32>(p.parts);
  const int part = blockIdx.x % static_cast<u32>(p.parts);
  u16* const mine = counts + (thread >> 5) * p.clusters;

  PartLabels<kWarps> own(part, p.label_bits);
  own.read(p.labels + head * p.tokens, p.tokens);
  i32 before[kShare] = {};  // tokens of the thread's labels in earlier parts
  i32 size[kShare] = {};
  const u16* of_part = p.counts + head * p.parts * p.clusters + thread;
#pragma unroll 4
  for (int other = 0; other < p.parts; ++other, of_part += p.clusters) {
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const i32 count = thread + i * kThreads < p.clusters ? __ldg(of_part + i * kThreads) : 0;
      size[i] += count;
      if (other < part) before[i] += count;
    }
  }
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
    const int label = thread + i * kThreads;
    if (label >= p.clusters) continue;
    starts[label] = size[i];
    if (part == 0) p.sizes[head * p.clusters + label] = size[i];
  }
  own.count(p.clusters, p.label_bits, mine);
  __syncthreads();

  // Counts become the tokens of earlier warps of the part.
#pragma unroll 1
  for (int label = thread; label < p.clusters; label += kThreads) {
    u16* count = counts + label;
    u32 sum = 0;
#pragma unroll 4
    for (int w = 0; w < kWarps; ++w, count += p.clusters) {
      const u32 of_warp = *count;
      *count = static_cast<u16>(sum);
      sum += of_warp;
    }
  }
  // For the sum over labels a thread has neighbours.
  const int share = (p.clusters + kThreads - 1) / kThreads;
  const int begin = min(thread * share, p.clusters);
  const int end = min(begin + share, p.clusters);
  i32 sum = 0;
#pragma unroll 1
  for (int label = begin; label < end; ++label) sum += starts[label];
  i32 at = sum_before<kWarps>(sum, totals);
#pragma unroll 1
  for (int label = begin; label < end; ++label) {
    const i32 size = starts[label];
    starts[label] = at;
    if (part == 0) p.starts[head * p.clusters + label] = at;
    at += size;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
    const int label = thread + i * kThreads;
    if (label < p.clusters) starts[label] += before[i];
  }
  __syncthreads();

  i32* const order = p.order + head * p.tokens;
#pragma unroll
  for (int i = 0; i < own.kRounds; ++i) {
    const u32 label = own.label(i);
    const bool there = label != own.none;
    const int rank = own.rank(i);
    if (there) order[starts[label] + mine[label] + rank] = own.first + 32 * i;
    __syncwarp();
    if (there && rank == 0) mine[label] += static_cast<u16>(own.alike(i));
    __syncwarp();
  }
}

}  // namespace tessera

// The one entry of a specialisation.
#define TESSERA_KMEANS_ORDER(WARPS, MIN_CTAS)                                   \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)            \
      kmeans_order(const __grid_constant__ tessera::KmeansOrderParams params) { \
    tessera::kmeans_order<WARPS>(params);                                       \
  }
