// The labels of a part of a head's tokens, in registers, and how many each warp has of each.
//
// A part is 32 tokens a warp and round; a warp's tokens are neighbours. Ballots tell the lanes of
// one label, the first of which adds their number, so that no two write one counter and nothing
// depends on who comes first. All labels are read at once, so that a part waits for memory once.
#pragma once

#include "common/builders.cuh"
#include "common/ptx.cuh"
#include "common/types.cuh"

namespace tessera {

template <int kWarps>
struct PartLabels {
  static constexpr int kRounds = 8;
  static constexpr int kTokens = kWarps * 32 * kRounds;  // of a part

  const int lane = threadIdx.x & 31;
  const u32 none;   // past every label, and with the bit that no label has
  const int first;  // the lane's first token; the others are 32 apart

  __device__ __forceinline__ PartLabels(int part, int label_bits)
      : none(1u << label_bits),
        first(part * kTokens + static_cast<int>(threadIdx.x >> 5) * 32 * kRounds + lane) {}

  __device__ __forceinline__ void read(const i32* labels, int tokens) {
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const int token = first + 32 * i;
      held[i] = token < tokens ? static_cast<u32>(__ldg(labels + token)) : none;
    }
  }

  // Counts the warp's labels in `mine`, 16 bits for each.
  __device__ __forceinline__ void count(int clusters, int label_bits, u16* mine) {
#pragma unroll 1
    for (int i = lane; i < clusters; i += 32) mine[i] = 0;
    __syncwarp();
    // The lanes whose label is this lane's; those without a token have a label of their own.
    u32 peers[kRounds];
#pragma unroll
    for (int i = 0; i < kRounds; ++i) peers[i] = kAllLanes;
#pragma unroll 1
    for (int bit = 0; bit <= label_bits; ++bit) {
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        const bool on = held[i] >> bit & 1u;
        const u32 those = __ballot_sync(kAllLanes, on);
        peers[i] &= on ? those : ~those;
      }
    }
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      const u32 own = held[i];
      const u32 before = __popc(peers[i] & ((1u << lane) - 1u));
      const u32 all = __popc(peers[i]);
      if (own != none && before == 0) mine[own] += static_cast<u16>(all);
      // Pinned, or all three would be kept.
      held[i] = pinned(static_cast<int>(own | before << 16 | all << 24));
      __syncwarp();
    }
  }

  __device__ __forceinline__ u32 label(int i) const { return held[i] & 0xffffu; }
  // Lanes of the same label before this one, and of all.
  __device__ __forceinline__ int rank(int i) const { return held[i] >> 16 & 0xffu; }
  __device__ __forceinline__ int alike(int i) const { return held[i] >> 24; }

 private:
  u32 held[kRounds];  // label, rank and alike: one register for the three
};

}  // namespace tessera
