// A map of clusters as a map of their pieces: out[i, j] = kept[q_label[i], k_label[j]].
//
// Labels past the clusters are text's, which attends to all and is attended by all; -1 is no piece,
// and keeps nothing. One CTA a row; a thread reads four labels and writes four bytes at a time. No
// shared memory.
#pragma once

#include "common/types.cuh"

namespace tessera {

struct ExpandPiecesParams {
  const u8* kept;       // (heads, q_clusters, k_clusters), 0 or 1
  const i32* q_labels;  // (heads, q_pieces)
  const i32* k_labels;  // (heads, k_pieces)
  u32* out;             // (heads, q_pieces, k_pieces) bytes
  i32 q_clusters;
  i32 k_clusters;
  i32 q_pieces;
  i32 k_pieces;  // a multiple of 4
};

template <int kWarps>
__device__ __forceinline__ void expand_pieces(const ExpandPiecesParams& p) {
  const i64 head = blockIdx.x / static_cast<u32>(p.q_pieces);
  const i32 q_label = __ldg(p.q_labels + blockIdx.x);
  const int words = p.k_pieces / 4;
  const int4* const k_labels = reinterpret_cast<const int4*>(p.k_labels) + head * words;
  const bool of_cluster = q_label >= 0 && q_label < p.q_clusters;
  const u8* const kept = p.kept + (head * p.q_clusters + (of_cluster ? q_label : 0)) * p.k_clusters;
  u32* const out = p.out + static_cast<i64>(blockIdx.x) * words;
  auto keeps = [&](i32 k_label) {
    if (q_label < 0 || k_label < 0) return 0u;
    if (!of_cluster || k_label >= p.k_clusters) return 1u;
    return static_cast<u32>(__ldg(kept + k_label) != 0);
  };
  for (int i = threadIdx.x; i < words; i += kWarps * 32) {
    const int4 labels = __ldg(k_labels + i);
    out[i] = keeps(labels.x) | keeps(labels.y) << 8 | keeps(labels.z) << 16 | keeps(labels.w) << 24;
  }
}

}  // namespace tessera

// The one entry of a specialisation.
#define TESSERA_EXPAND_PIECES(WARPS, MIN_CTAS)                                    \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)              \
      expand_pieces(const __grid_constant__ tessera::ExpandPiecesParams params) { \
    tessera::expand_pieces<WARPS>(params);                                        \
  }
