// What the kernels that build plans share: the numbers that the host may read, and error flags.
#pragma once

#include "common/types.cuh"

namespace tessera {

inline constexpr u32 kAllLanes = 0xffffffffu;

// Of a mask (mask_state.cu; the last, ragged_blocks.cu). The errors are where those of TileCount
// are.
enum MaskScalar { kNnz, kInRuns, kPresent };

enum BuildError : u32 {
  kOutOfRange = 1,  // a column, or a bit, past nk
  kDuplicate = 2,   // a column twice in a row
  kCapacity = 4,    // an output that is too small
  kBadCount = 8,    // a count or an offset outside of its list, or a last one before its end
  kBadSize = 16,    // a block's size below 0 or above the nominal one
  kBadTotal = 32,   // sizes that do not sum to the tokens
};

// Element of an array of i64 or i32.
__device__ __forceinline__ i64 integer(const void* array, i64 index, i32 wide) {
  return wide ? __ldg(static_cast<const i64*>(array) + index)
              : __ldg(static_cast<const i32*>(array) + index);
}

// Sums over the lanes up to and with the own one.
template <typename T>
__device__ __forceinline__ T warp_scan(T value) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T other = __shfl_sync(kAllLanes, value, (lane - step) & 31);
    if (lane >= step) value += other;
  }
  return value;
}

// Sum over the lanes of numbers from 0 to 2^43.
__device__ __forceinline__ i64 warp_total(i64 value) {
  const u32 low = __reduce_add_sync(kAllLanes, static_cast<u32>(value) & 0xffffu);
  const u32 high = __reduce_add_sync(kAllLanes, static_cast<u32>(value >> 16));
  return (static_cast<i64>(high) << 16) + low;
}

}  // namespace tessera
