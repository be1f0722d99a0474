// The records of the tasks, and every tile's list where the columns of the bitmap are single keys:
// what tile_fragments.cu writes of blocks. All fragments are gathered: a class's keys, ascending,
// are cut every `slot` keys, and fragment f of all lists has its keys at rows[f * slot], so that no
// sum over the tiles says where. Runs of neighbouring keys are gathered too; mapping/gather.py,
// which has the time, makes blocks of long ones. The parts of a split group have the first part's
// keys.
//
// A warp a tile: a lane takes a word of the bitmap, a warp the keys of its 32 words class by class.
// grid = CTAs for all tasks that there is room for, then CTAs for all tiles; what does not fit an
// output is not written.
//
// Shared memory: 2 KB a warp for the keys of 32 words of the bitmap.
//
// Expected on an H200, a prediction: of groups of 128 rows of 57,600 tokens, 8 heads, density 0.1,
// 26 MB of bitmap from L2, 83 MB of keys written, 57 rounds of 250 instructions a warp: 25 to 30
// us.
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
  // The part of its group, whose first part has the keys.
  const int index = tile - tile / p.by_head_tiles * p.head_tiles;
  const int part = index - index / p.by_parts * p.parts;
  const i64 first_key = p.frag_offsets[tile - part] * p.slot;
  auto place_of = [&](int of, int i) { return writer.place(list, of != 0, of == 2, i); };
  const u32 of_block = block_members<false>(p, rows, 0);
  const u32 of_next = rows.blocks > 1 ? block_members<false>(p, rows, 1) : 0;
#pragma unroll 1
  for (int of = 0; of < 3; ++of) {
    const u32 members = of == 0 ? of_block | of_next : of == 1 ? of_block : of_next;
    const int count = of == 0 ? keys.both : of == 1 ? keys.first : keys.second;
#pragma unroll 1
    for (int i = lane; i * p.slot < count; i += 32) {
      const int place = place_of(of, i);
      const u32 length = min(p.slot, count - i * p.slot);
      writer.put(place, static_cast<u32>(first_key + place * p.slot),
                 length << 24 | kGathered | members);
    }
  }
  if (p.share) writer.pad_list(list);
  if (part != 0) return;

  i32* const keys_of_tile = p.rows + first_key;
  int before[3] = {0, 0, 0};  // keys of each class so far
#pragma unroll 1
  for (int base = 0; base < p.words; base += 32) {
    const ClassWords words = key_words(p, rows, bitmap, base + lane);
    const int counts = __popc(words.both) | __popc(words.first) << 16;
    const int upto = warp_scan(counts);
    const int second_upto = warp_scan(__popc(words.second));
    const int totals = __shfl_sync(kAllLanes, upto, 31);
    const int both_here = totals & 0xffff;
    const int halves_begin = both_here + (totals >> 16);
    const int here = halves_begin + __shfl_sync(kAllLanes, second_upto, 31);
    const int own = upto - counts;
    append_bits(entries + (own & 0xffff), words.both, lane * 32);
    append_bits(entries + both_here + (own >> 16), words.first, lane * 32);
    append_bits(entries + halves_begin + second_upto - __popc(words.second), words.second,
                lane * 32);
    __syncwarp();
#pragma unroll 1
    for (int k = lane; k < here; k += 32) {
      const int of = k >= halves_begin ? 2 : k >= both_here ? 1 : 0;
      const int rank = k + (of == 2   ? before[2] - halves_begin
                            : of == 1 ? before[1] - both_here
                                      : before[0]);
      const int i = rank / p.by_slot;
      const int place = place_of(of, i);
      if (place < writer.room) {
        keys_of_tile[static_cast<i64>(place) * p.slot + rank - i * p.slot] = base * 32 + entries[k];
      }
    }
    __syncwarp();
    before[0] += both_here;
    before[1] += totals >> 16;
    before[2] += here - halves_begin;
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
