// The records of the tasks, a thread a task, and every tile's list of fragments, a warp a tile
// (common/tiles.cuh). grid = CTAs for all tasks that there is room for, then CTAs for all tiles, so
// that nobody waits for one before the other; what does not fit an output is not written.
//
// Shared memory: 2 KB a warp for the entries of 32 words of the bitmap.
#pragma once

#include "common/tile_lists.cuh"

namespace tessera {

// A lane takes a word of the bitmap, and a warp the entries of its 32 words class by class.
template <bool kRagged>
__device__ __forceinline__ void write_list(const TilesParams& p, int tile, u16* entries) {
  const int lane = threadIdx.x & 31;
  const TileRows rows = tile_rows<kRagged>(p, tile);
  const u32* bitmap = bitmap_rows(p, rows);
  const Classes counted = p.classes[tile];
  const i64 begin = p.frag_offsets[tile];
  const i64 room = p.frag_capacity - begin;
  const ListWriter writer{reinterpret_cast<u64*>(p.frags) + begin,
                          room < 0            ? 0
                          : room < 0x7fffffff ? static_cast<i32>(room)
                                              : 0x7fffffff,
                          p.per_step, p.by_per_step};
  const int most = fragments_of(p, p.kv_block);
  // Where no block lies in both halves and each half has one, a class says who its members are.
  const bool alike = p.share && rows.blocks == 2 && 2 * p.q_block == p.tile_rows;
  const bool halves = kRagged && p.q_starts != nullptr ? rows.half >= 0 : alike;
  const bool known = halves || rows.blocks == 1;
  const u32 of_block = block_members<kRagged>(p, rows, 0);
  const u32 of_next = halves ? block_members<kRagged>(p, rows, 1) : 0;

  Layout list{};
  // The members of a class that says who they are, and those of a block column of another one.
  auto members_of_class = [&](bool of_half, bool of_second) {
    return !halves ? of_block : of_second ? of_next : of_half ? of_block : of_block | of_next;
  };
  auto members_of = [&](int word_index, int bit) {
    u32 members = 0;
    each_block(p, rows, bitmap + word_index, [&](int s, u32 word) {
      if (word >> bit & 1) members |= block_members<kRagged>(p, rows, s);
    });
    return members;
  };
  auto place_of = [&](bool of_half, bool of_second, int i) {
    return writer.place(list, of_half, of_second, i);
  };
  // Entries of the classes so far; of ragged blocks, whole fragments, and short ones.
  int both = 0;
  int first = 0;
  int second = 0;
  int both_short = 0;
  int first_short = 0;
  int second_short = 0;
#pragma unroll 1
  for (int base = 0; base < p.words; base += 32) {
    const ClassWords words = class_words<kRagged>(p, rows, bitmap, base + lane);
    // Only here, so that the first words do not wait for the counts.
    if (base == 0) list = lay_out(p, counted);
    if (kRagged && p.kv_starts != nullptr) {
      // A lane writes the fragments of its own word's runs, which differ in number.
      const i32* starts = kv_starts_of(p, rows.head) + 32 * (base + lane);
#pragma unroll 1
      for (int of = 0; of < 3; ++of) {
        const Runs of_word(of == 0   ? words.both
                           : of == 1 ? words.first
                                     : words.second,
                           words.apart);
        int whole = 0;
        int shorter = 0;
#pragma unroll 1
        for (Runs runs = of_word; runs.any(); runs.next()) {
          const int length = runs.end(starts) - runs.begin(starts);
          const int filled = length / p.by_slot;
          whole += filled;
          shorter += filled * p.slot < length;
        }
        const int whole_upto = warp_scan(whole);
        const int short_upto = warp_scan(shorter);
        int rising = (of == 0 ? both : of == 1 ? first : second) + whole_upto - whole;
        int falling = (of == 0   ? counted.both - both_short
                       : of == 1 ? counted.first - first_short
                                 : counted.second - second_short) -
                      1 - (short_upto - shorter);
#pragma unroll 1
        for (Runs runs = of_word; runs.any(); runs.next()) {
          const u32 members =
              known ? members_of_class(of != 0, of == 2) : members_of(base + lane, runs.first());
          const int end = runs.end(starts);
#pragma unroll 1
          for (int start = runs.begin(starts); start < end; start += p.slot) {
            const u32 length = min(p.slot, end - start);
            const int i = length == p.slot ? rising++ : falling--;
            writer.put(place_of(of != 0, of == 2, i), start, length << 24 | members);
          }
        }
        const int wholes = __shfl_sync(kAllLanes, whole_upto, 31);
        const int shorts = __shfl_sync(kAllLanes, short_upto, 31);
        both += of == 0 ? wholes : 0;
        first += of == 1 ? wholes : 0;
        second += of == 2 ? wholes : 0;
        both_short += of == 0 ? shorts : 0;
        first_short += of == 1 ? shorts : 0;
        second_short += of == 2 ? shorts : 0;
      }
      continue;
    }
    const int counts = __popc(words.both) | __popc(words.first) << 16;
    const int upto = warp_scan(counts);
    const int second_upto = warp_scan(__popc(words.second));
    const int totals = __shfl_sync(kAllLanes, upto, 31);
    const int both_here = totals & 0xffff;
    const int halves_begin = both_here + (totals >> 16);
    const int here = halves_begin + __shfl_sync(kAllLanes, second_upto, 31);
    const int before = upto - counts;
    append_bits(entries + (before & 0xffff), words.both, lane * 32);
    append_bits(entries + both_here + (before >> 16), words.first, lane * 32);
    append_bits(entries + halves_begin + second_upto - __popc(words.second), words.second,
                lane * 32);
    __syncwarp();
#pragma unroll 1
    for (int k = lane; k < here; k += 32) {
      const int entry = entries[k];
      const bool of_second = k >= halves_begin;
      const bool of_half = k >= both_here;
      const u32 members = known ? members_of_class(of_half, of_second)
                                : members_of(base + (entry >> 5), entry & 31);
      const int rank = k + (of_second ? second - halves_begin : of_half ? first - both_here : both);
      const int start = (base * 32 + entry) * p.kv_block;
      const int width = min(p.kv_block, p.skv - start);
#pragma unroll 1
      for (int j = 0; j * p.slot < width; ++j) {
        const int place = place_of(of_half, of_second, rank * most + j);
        const u32 length = min(p.slot, width - j * p.slot);
        writer.put(place, start + j * p.slot, length << 24 | members);
      }
    }
    __syncwarp();
    both += both_here;
    first += totals >> 16;
    second += here - halves_begin;
  }
  if (p.share) writer.pad_list(list);
}

template <bool kRagged, int kWarps>
__device__ __forceinline__ void tile_fragments(const TilesParams& p) {
  extern __shared__ __align__(1024) u8 dynamic_smem[];
  constexpr int kEntries = 32 * 32;
  const int task_ctas = ceil_div(p.task_capacity, kWarps * 32);
  const int block = blockIdx.x;
  if (block < task_ctas) {
    write_task<kRagged>(p, block * kWarps * 32 + threadIdx.x);
    return;
  }
  const int warp = threadIdx.x >> 5;
  const int tile = (block - task_ctas) * kWarps + warp;
  if (tile < p.tiles)
    write_list<kRagged>(p, tile, reinterpret_cast<u16*>(dynamic_smem) + warp * kEntries);
}

}  // namespace tessera

// The one entry of a specialisation. One CTA a multiprocessor is named so that ptxas does not aim
// at more by spilling.
#define TESSERA_TILE_FRAGMENTS(WARPS, RAGGED)                               \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)               \
      tile_fragments(const __grid_constant__ tessera::TilesParams params) { \
    tessera::tile_fragments<RAGGED, WARPS>(params);                         \
  }
