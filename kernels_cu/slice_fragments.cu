// The records of the tasks, and every tile's list where the columns of the bitmap are single keys:
// what tile_fragments.cu writes of blocks. All fragments are gathered: a class's keys, ascending,
// are cut every `slot` keys. The keys of the tile whose list begins at fragment f begin at
// rows[f * slot], class after class, each at a multiple of `slot`, so that no other sum over the
// tiles is needed. Runs of neighbouring keys are gathered too; mapping/gather.py makes blocks of
// long ones. The parts of a split group have the first part's keys.
//
// A warp a tile: a lane takes a word of the bitmap, a warp the keys of its 32 words class by class.
// grid = CTAs for all tasks that there is room for, then CTAs for all tiles; what does not fit an
// output is not written.
//
// Shared memory: 2 KB a warp for the keys of 32 words of the bitmap.
//
// Expected on an H200, a prediction: 57,600 tokens, 8 heads, density 0.1, so 27 tiles a
// multiprocessor of 57 rounds each. Retain, groups of 128: 220 instructions a round, 83 MB of keys:
// 60 us. Share, groups of 64: 400 a round and 158 MB: 110 us.
#pragma once

#include "common/tile_lists.cuh"

namespace tessera {

__device__ __forceinline__ void write_keys(const TilesParams& p, int tile, u16* entries) {
  const int lane = threadIdx.x & 31;
  const TileRows rows = tile_rows<false>(p, tile);
  const u32* bitmap = bitmap_rows(p, rows);
  const Classes keys = p.classes[tile];
  const Classes fragments = fragments_of_keys(p, keys);
  const Layout list = lay_out(p, fragments);
  const i64 begin = p.frag_offsets[tile];
  const i64 room = p.frag_capacity - begin;
  const ListWriter writer{reinterpret_cast<u64*>(p.frags) + begin,
                          room < 0            ? 0
                          : room < 0x7fffffff ? static_cast<i32>(room)
                                              : 0x7fffffff,
                          p.per_step, p.by_per_step};
  // The part of its group, whose first part has the keys: those of a class behind another's.
  const int index = tile - tile / p.by_head_tiles * p.head_tiles;
  const int part = index - index / p.by_parts * p.parts;
  const i64 first_key = p.frag_offsets[tile - part] * p.slot;
  const int begin_of[3] = {0, fragments.both * p.slot, (fragments.both + fragments.first) * p.slot};
  const u32 of_block = block_members<false>(p, rows, 0);
  const u32 of_next = rows.blocks > 1 ? block_members<false>(p, rows, 1) : 0;
#pragma unroll
  for (int of = 0; of < 3; ++of) {
    if (of > 0 && !p.share) break;
    const u32 members = of == 0 ? of_block | of_next : of == 1 ? of_block : of_next;
    const int count = of == 0 ? keys.both : of == 1 ? keys.first : keys.second;
#pragma unroll 1
    for (int i = lane; i * p.slot < count; i += 32) {
      const int key = i * p.slot;
      const u32 length = min(p.slot, count - key);
      writer.put(writer.place(list, of > 0, of == 2, i),
                 static_cast<u32>(first_key + begin_of[of] + key),
                 length << 24 | kGathered | members);
    }
  }
  if (p.share) writer.pad_list(list);
  if (part != 0) return;

  i32* const keys_of_tile = p.rows + first_key;
  // All of a tile's keys have room, or none.
  if (writer.room < p.tile_frags[tile]) return;
  int next[3] = {begin_of[0], begin_of[1], begin_of[2]};
#pragma unroll 1
  for (int base = 0; base < p.words; base += 32) {
    const ClassWords words = key_words(p, rows, bitmap, base + lane);
    const u32 of_class[3] = {words.both, words.first, words.second};
    // Counts of 11 bits. The last sum of the third may be 1024, which is taken apart below.
    const u32 own = __popc(words.both) | __popc(words.first) << 11 | __popc(words.second) << 22;
    const u32 before = warp_scan(own) - own;
    const u32 last_before = __shfl_sync(kAllLanes, before, 31);
    const u32 last_own = __shfl_sync(kAllLanes, own, 31);
#pragma unroll
    for (int of = 0; of < 3; ++of) {
      if (of > 0 && !p.share) break;
      auto field = [&](u32 counts) { return static_cast<int>(counts >> (11 * of) & 0x7ff); };
      append_bits(entries + field(before), of_class[of], lane * 32);
      __syncwarp();
      const int here = field(last_before) + field(last_own);
      i32* const to = keys_of_tile + next[of];
#pragma unroll 1
      for (int i = lane; i < here; i += 32) to[i] = base * 32 + entries[i];
      __syncwarp();
      next[of] += here;
    }
  }
}

template <int kWarps>
__device__ __forceinline__ void slice_fragments(const TilesParams& p) {
  extern __shared__ __align__(1024) u8 dynamic_smem[];
  constexpr int kEntries = 32 * 32;
  const int task_ctas = ceil_div(p.task_capacity, kWarps * 32);
  const int block = blockIdx.x;
  if (block < task_ctas) {
    write_task<false>(p, block * kWarps * 32 + threadIdx.x);
    return;
  }
  const int warp = threadIdx.x >> 5;
  const int tile = (block - task_ctas) * kWarps + warp;
  if (tile < p.tiles) {
    write_keys(p, tile, reinterpret_cast<u16*>(dynamic_smem) + warp * kEntries);
  }
}

}  // namespace tessera

// The one entry of a specialisation. One CTA a multiprocessor is named so that ptxas does not aim
// at more by spilling.
#define TESSERA_SLICE_FRAGMENTS(WARPS)                                       \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)                \
      slice_fragments(const __grid_constant__ tessera::TilesParams params) { \
    tessera::slice_fragments<WARPS>(params);                                 \
  }
