// Keys of each class, length and steps of every tile's list, where the columns of the bitmap are
// single keys (common/tiles.cuh): what tile_counts.cu counts of blocks. A class's keys, wherever
// they lie, fill its fragments, of which the last one alone is short. A warp a tile. grid = CTAs
// for all tiles. No shared memory.
//
// Expected on an H200, a prediction: of groups of 128 rows of 57,600 tokens, 8 heads, 26 MB of
// bitmap that mask_state left in L2, 57 words a lane: 9 us.
#pragma once

#include "common/tiles.cuh"

namespace tessera {

__device__ __forceinline__ void slice_counts(const TilesParams& p) {
  const int lane = threadIdx.x & 31;
  const int tile = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
  if (tile >= p.tiles) return;
  const TileRows rows = tile_rows<false>(p, tile);
  const u32* bitmap = bitmap_rows(p, rows);
  Classes keys{};
#pragma unroll 4
  for (int index = lane; index < p.words; index += 32) {
    const ClassWords words = key_words(p, rows, bitmap, index);
    keys.both += __popc(words.both);
    keys.first += __popc(words.first);
    keys.second += __popc(words.second);
  }
  keys.both = __reduce_add_sync(kAllLanes, keys.both);
  keys.first = __reduce_add_sync(kAllLanes, keys.first);
  keys.second = __reduce_add_sync(kAllLanes, keys.second);
  if (lane != 0) return;
  const Classes fragments = fragments_of_keys(p, keys);
  const Layout list = lay_out(p, fragments);
  const int steps = list.both_steps + list.first_steps + list.second_steps;
  p.classes[tile] = keys;
  p.tile_q[2 * tile] = rows.first;
  p.tile_q[2 * tile + 1] = word_of_rows(rows);
  p.tile_frags[tile] = p.share ? steps * p.per_step : fragments.both;
  p.tile_steps[tile] = steps;
}

}  // namespace tessera

// The one entry of a specialisation. One CTA a multiprocessor is named so that ptxas does not aim
// at more by spilling.
#define TESSERA_SLICE_COUNTS(WARPS)                                       \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)             \
      slice_counts(const __grid_constant__ tessera::TilesParams params) { \
    tessera::slice_counts(params);                                        \
  }
