// What the kernels that build plans share: the numbers that the host may read, and error flags.
#pragma once

#include "common/types.cuh"

namespace tessera {

inline constexpr u32 kAllLanes = 0xffffffffu;

// Of a mask (mask_state.cu). The errors are where those of TileCount are.
enum MaskScalar { kNnz, kInRuns, kLongest, kShortest, kTicket = 7 };

enum BuildError : u32 {
  kOutOfRange = 1,  // a column, or a bit, past nk
  kDuplicate = 2,   // a column twice in a row
  kCapacity = 4,    // an output that is too small
  kBadCount = 8,    // a count or an offset outside of its list
};

}  // namespace tessera
