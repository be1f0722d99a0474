// Tokens sorted by label, stably, and how many have each: a counting sort, one CTA a head.
//
// Each warp owns a run of tokens. It counts their labels, 32 at a time: ballots tell the lanes of
// one label, the first of which adds their number, so that no two write one counter. Sums over the
// warps and over the labels then say where each warp's tokens of each label begin, and the warps
// walk over their tokens again. Nothing depends on who comes first.
//
// Shared memory: a count of 16 bits for each warp and label, and where each label begins.
#pragma once

#include "common/builders.cuh"
#include "common/scan.cuh"
#include "common/types.cuh"

namespace tessera {

struct KmeansOrderParams {
  const i32* labels;  // (heads, tokens), 0 to clusters - 1
  i32* order;         // (heads, tokens): tokens by label
  i32* sizes;         // (heads, clusters)
  i32* starts;        // (heads, clusters)
  i32 tokens;
  i32 clusters;
  i32 label_bits;  // 2^label_bits >= clusters
};

// The lanes whose label is this lane's. Lanes without a token have a label of their own.
__device__ __forceinline__ u32 peers_of(i32 label, int bits) {
  u32 peers = kAllLanes;
  for (int bit = 0; bit <= bits; ++bit) {
    const bool on = (label >> bit) & 1;
    const u32 those = __ballot_sync(kAllLanes, on);
    peers &= on ? those : ~those;
  }
  return peers;
}

template <int kWarps>
__device__ __forceinline__ void kmeans_order(const KmeansOrderParams& p) {
  extern __shared__ __align__(1024) u8 dynamic_smem[];
  constexpr int kThreads = kWarps * 32;
  i32* const starts = reinterpret_cast<i32*>(dynamic_smem);     // [clusters]
  i32* const totals = starts + p.clusters;                      // [warps]
  u16* const counts = reinterpret_cast<u16*>(totals + kWarps);  // [warps][clusters]
  const int thread = threadIdx.x;
  const int lane = thread & 31;
  const int warp = thread >> 5;
  const i64 head = blockIdx.x;
  const i32* const labels = p.labels + head * p.tokens;
  i32* const order = p.order + head * p.tokens;
  u16* const mine = counts + warp * p.clusters;

  for (int i = lane; i < p.clusters; i += 32) mine[i] = 0;
  __syncwarp();
  const int run = (p.tokens + kThreads - 1) / kThreads * 32;
  const int begin = min(warp * run, p.tokens);
  const int end = min(begin + run, p.tokens);
  // Past every label, and with the bit that no label has.
  const i32 none = 1 << p.label_bits;
  for (int first = begin; first < end; first += 32) {
    const int token = first + lane;
    const i32 label = token < end ? __ldg(labels + token) : none;
    const u32 peers = peers_of(label, p.label_bits);
    if (label != none && lane == __ffs(static_cast<int>(peers)) - 1)
      mine[label] += static_cast<u16>(__popc(peers));
    __syncwarp();
  }
  __syncthreads();

  // Of each label: counts become the tokens of earlier warps; the sum over all warps is its size.
  // A thread has neighbouring labels.
  const int share = (p.clusters + kThreads - 1) / kThreads;
  const int label_begin = min(thread * share, p.clusters);
  const int label_end = min(label_begin + share, p.clusters);
  i32 own = 0;
  for (int label = label_begin; label < label_end; ++label) {
    i32 size = 0;
    for (int w = 0; w < kWarps; ++w) {
      const u16 count = counts[w * p.clusters + label];
      counts[w * p.clusters + label] = static_cast<u16>(size);
      size += count;
    }
    p.sizes[head * p.clusters + label] = size;
    starts[label] = size;
    own += size;
  }
  i32 at = sum_before<kWarps>(own, totals);
  for (int label = label_begin; label < label_end; ++label) {
    const i32 size = starts[label];
    starts[label] = at;
    p.starts[head * p.clusters + label] = at;
    at += size;
  }
  __syncthreads();

  for (int first = begin; first < end; first += 32) {
    const int token = first + lane;
    const i32 label = token < end ? __ldg(labels + token) : none;
    const u32 peers = peers_of(label, p.label_bits);
    const int rank = __popc(peers & ((1u << lane) - 1u));
    if (label != none) order[starts[label] + mine[label] + rank] = token;
    __syncwarp();
    if (label != none && rank == 0) mine[label] += static_cast<u16>(__popc(peers));
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
