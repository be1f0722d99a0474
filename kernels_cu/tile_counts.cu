// Fragments of each class, length and steps of every tile's list (common/tiles.cuh): a warp a tile.
// A lane counts the bits of one word of the bitmap at a time. grid = CTAs for all tiles. No shared
// memory.
#pragma once

#include "common/tiles.cuh"

namespace tessera {

template <bool kRagged>
__device__ __forceinline__ void tile_counts(const TilesParams& p) {
  const int lane = threadIdx.x & 31;
  const int tile = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
  if (tile >= p.tiles) return;
  const TileRows rows = tile_rows<kRagged>(p, tile);
  const u32* bitmap = bitmap_rows(p, rows);
  const int most = fragments_of(p, p.kv_block);
  const bool ragged = kRagged && p.kv_starts != nullptr;
  const int missing = ragged ? 0 : most - fragments_of(p, p.skv - (p.nk - 1) * p.kv_block);
  const i32* starts = ragged ? kv_starts_of(p, rows.head) : nullptr;
  Classes count{};
  for (int index = lane; index < p.words; index += 32) {
    const ClassWords words = class_words<kRagged>(p, rows, bitmap, index);
    const bool last = index == p.words - 1;
    auto fragments = [&](u32 word) {
      if (ragged) return ragged_fragments(p, starts + 32 * index, Runs(word, words.apart));
      const bool tail = last && (word >> ((p.nk - 1) & 31) & 1) != 0;
      return __popc(word) * most - (tail ? missing : 0);
    };
    count.both += fragments(words.both);
    count.first += fragments(words.first);
    count.second += fragments(words.second);
  }
  count.both = __reduce_add_sync(kAllLanes, count.both);
  count.first = __reduce_add_sync(kAllLanes, count.first);
  count.second = __reduce_add_sync(kAllLanes, count.second);
  if (lane != 0) return;
  const Layout list = lay_out(p, count);
  const int steps = list.both_steps + list.first_steps + list.second_steps;
  p.classes[tile] = count;
  p.tile_q[2 * tile] = rows.first;
  p.tile_q[2 * tile + 1] = word_of_rows(rows);
  p.tile_frags[tile] = p.share ? steps * p.per_step : count.both;
  p.tile_steps[tile] = steps;
}

}  // namespace tessera

// The one entry of a specialisation. One CTA a multiprocessor is named so that ptxas does not aim
// at more by spilling.
#define TESSERA_TILE_COUNTS(WARPS, RAGGED)                               \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)            \
      tile_counts(const __grid_constant__ tessera::TilesParams params) { \
    tessera::tile_counts<RAGGED>(params);                                \
  }
