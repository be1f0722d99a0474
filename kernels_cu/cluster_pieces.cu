// Clusters cut into pieces of at most so many tokens: how many each piece has, and of which cluster
// it is. What lies beyond the last piece has no tokens and the label -1. One CTA a head: sums over
// the clusters say where each one's pieces end, and each piece looks for its cluster there.
//
// Shared memory: an int32 a label, and one a warp.
#pragma once

#include "common/builders.cuh"
#include "common/scan.cuh"
#include "common/types.cuh"

namespace tessera {

struct ClusterPiecesParams {
  const i32* sizes;   // (heads, labels)
  i32* piece_sizes;   // (heads, capacity)
  i32* piece_labels;  // (heads, capacity)
  float* weights;     // (heads, clusters): the sizes of the first `clusters` labels
  i32 labels;
  i32 clusters;
  i32 capacity;
  i32 piece;  // most tokens of a piece
};

template <int kWarps>
__device__ __forceinline__ void cluster_pieces(const ClusterPiecesParams& p) {
  extern __shared__ __align__(1024) u8 dynamic_smem[];
  constexpr int kThreads = kWarps * 32;
  i32* const ends = reinterpret_cast<i32*>(dynamic_smem);  // [labels]: one past the last piece
  i32* const totals = ends + p.labels;                     // [warps]
  const int thread = threadIdx.x;
  const i64 head = blockIdx.x;
  const i32* const sizes = p.sizes + head * p.labels;

  // A thread has neighbouring labels.
  const int share = (p.labels + kThreads - 1) / kThreads;
  const int begin = min(thread * share, p.labels);
  const int end = min(begin + share, p.labels);
  i32 own = 0;
  for (int label = begin; label < end; ++label) {
    const i32 size = __ldg(sizes + label);
    own += (size + p.piece - 1) / p.piece;
    if (label < p.clusters) p.weights[head * p.clusters + label] = static_cast<float>(size);
  }
  i32 at = sum_before<kWarps>(own, totals);
  for (int label = begin; label < end; ++label) {
    at += (__ldg(sizes + label) + p.piece - 1) / p.piece;
    ends[label] = at;
  }
  __syncthreads();

  const i32 count = ends[p.labels - 1];
  for (int i = thread; i < p.capacity; i += kThreads) {
    i32 label = -1;
    i32 size = 0;
    if (i < count) {
      // The first label whose pieces end behind this one.
      int low = 0;
      for (int high = p.labels - 1; low < high;) {
        const int middle = (low + high) / 2;
        if (ends[middle] > i) {
          high = middle;
        } else {
          low = middle + 1;
        }
      }
      label = low;
      const i32 first = low > 0 ? ends[low - 1] : 0;
      size = min(__ldg(sizes + low) - (i - first) * p.piece, p.piece);
    }
    p.piece_sizes[head * p.capacity + i] = size;
    p.piece_labels[head * p.capacity + i] = label;
  }
}

}  // namespace tessera

// The one entry of a specialisation.
#define TESSERA_CLUSTER_PIECES(WARPS, MIN_CTAS)                                     \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)                \
      cluster_pieces(const __grid_constant__ tessera::ClusterPiecesParams params) { \
    tessera::cluster_pieces<WARPS>(params);                                         \
  }
