// What the kernels share that write the records of the tasks and the lists of the tiles.
#pragma once

#include "common/tiles.cuh"

namespace tessera {

template <bool kRagged>
__device__ __forceinline__ void write_task(const TilesParams& p, int i) {
  if (i >= p.counts[kTasks]) return;
  const Turn turn = p.turns[i];
  const HeadTile of = head_tile(p, turn.pair);
  const int steps = p.tile_steps[of.tile];
  Task task;
  task.frag_count = p.tile_frags[of.tile];
  task.frag_begin = p.frag_offsets[of.tile];
  const TileRows rows = tile_rows<kRagged>(p, of.tile);
  task.head = of.head;
  task.begin = 0;
  task.end = steps;
  task.slot = -1;
  if (turn.parts > 1) {
    task.begin = part_begin(steps, turn.parts, turn.part);
    task.end = part_begin(steps, turn.parts, turn.part + 1);
    task.slot = p.pair_slots[turn.pair] + turn.part;
  }
  task.flags = 0;
  task.first_row = rows.first;
  task.rows = word_of_rows(rows);
  task.units = -1;
  p.tasks[i] = task;
}

// One tile's list as it is written.
struct ListWriter {
  u64* frags;  // of the tile's list
  i32 room;    // fragments that the output has from there on
  i32 per_step;
  Divisor by_per_step;

  __device__ __forceinline__ void put(int index, u32 start, u32 info) const {
    if (index < room) frags[index] = static_cast<u64>(info) << 32 | start;
  }
  // Step and place of fragment i of a half's class, which is in the half's step i / per_step: such
  // steps follow those of both, and take turns with the `other` half's, to which the first belongs.
  __device__ __forceinline__ int alone(int both_steps, int i, int other, int late) const {
    const int step = i / by_per_step;
    return (both_steps + step + min(step + late, other)) * per_step + i - step * per_step;
  }
  // Where fragment i of a class goes. The first `kept` fragments of a half stay in its steps; the
  // others, and both's, follow each other from `moved` on.
  __device__ __forceinline__ int place(const Layout& list, bool of_half, bool of_second,
                                       int i) const {
    const int kept = of_second ? list.second : of_half ? list.first : 0;
    const int moved = of_second ? list.both + list.of_first : of_half ? list.both : 0;
    const int other = of_second ? list.first_steps : list.second_steps;
    return i < kept ? alone(list.both_steps, i, other, of_second) : moved + i - kept;
  }
  __device__ __forceinline__ void pad(int begin, int end) const {
#pragma unroll 1
    for (int i = begin + (threadIdx.x & 31); i < end; i += 32) put(i, 0, 0);
  }
  // Fills the steps of a list by class.
  __device__ __forceinline__ void pad_list(const Layout& list) const {
    pad(list.both + list.of_first + list.of_second, list.both_steps * per_step);
    auto pad_half = [&](int count, int steps, int other, int late) {
      if (count == steps * per_step) return;
      const int begin_of_padding = alone(list.both_steps, count, other, late);
      pad(begin_of_padding, begin_of_padding + steps * per_step - count);
    };
    pad_half(list.first, list.first_steps, list.second_steps, 0);
    pad_half(list.second, list.second_steps, list.first_steps, 1);
  }
};

// Appends the positions of the set bits, from `base` on, to a list.
__device__ __forceinline__ void append_bits(u16* list, u32 word, int base) {
  for (; word != 0; word &= word - 1) *list++ = static_cast<u16>(base + __ffs(word) - 1);
}

}  // namespace tessera
