// What the kernels share that take a mask's bitmap to the tiles and tasks of the attention kernels,
// equal to what mapping/ and organization/ make of it on the host: no token bits, KV side pack.
//
//   bitmap  u32 [mask heads][nq][words]: bit c % 32 of word c / 32 is block column c, 0 past nk.
//   tile    `joined` neighbouring query blocks (merge, share), one block (retain), or one of
//           `parts` of a block (split). Its list is the union of its blocks' rows; an entry is
//           ceil(kv_block / slot) fragments, fewer in a short last block.
//   share   fragments of both halves of the tile's rows, of the first alone, of the second alone:
//           three classes, each padded to whole steps (mapping/share.py). Elsewhere all are `both`.
//   halves  of a tile that shares two ragged blocks: the second one begins in the middle of the
//           tile (mapping/tiles.py).
//   pair    a query head and a tile of its mask head. A task is a pair, or one of its split-K
//           parts.
//
// Blocks of a ragged side begin where q_starts or kv_starts says (ragged_blocks.cu); there are as
// many tiles as the largest blocks need, and those that have no rows have no task either. This is
// for entries of their own (kRagged): those of uniform blocks do not even look.
//
// Neighbouring ragged KV blocks with the same members are one run of keys, which ends at a word of
// the bitmap at the latest; a run is cut into fragments, of which the last may be short. In each
// class whole fragments rise from its first place, and short ones fall from its last, so that few
// steps have a column to mask.
//
// Three kernels, each launched once, with sizes that follow from the geometry alone; where the
// columns are single keys, which are gathered, slice_counts and slice_fragments take the place of
// the first and the last:
//   tile_counts     a warp a tile: fragments of each class, length and steps of the list.
//   tile_scan       one CTA: where each list begins; tasks in launch order (longest first inside
//                   each group of heads, split, last round), merge arrays, counts.
//   tile_fragments  a thread a task: the record, in CTAs of their own; a warp a tile: the list.
// An output that is too small is flagged in the counts; then there are no tasks, and nothing is
// written past any output's end.
//
// All numbers are integers, and no result depends on the order in which threads run.
#pragma once

#include "common/builders.cuh"
#include "common/types.cuh"

namespace tessera {

// Fragments of a tile's list by the halves of the tile that need them.
struct alignas(16) Classes {
  i32 both;
  i32 first;
  i32 second;
  i32 unused;
};

// A task before its numbers are looked up.
struct alignas(8) Turn {
  i32 pair;
  u16 part;
  u16 parts;
};

// Division of 0 to 2^31 - 1 by a number that the host knows: floor(n / d) is
// (n * multiplier) >> (31 + shift). A division of the GPU's own is 20 to 40 instructions.
struct alignas(8) Divisor {
  u32 multiplier;
  u32 shift;
};

__device__ __forceinline__ int operator/(int n, Divisor d) {
  const u64 product = static_cast<u64>(2u * static_cast<u32>(n)) * d.multiplier;
  return static_cast<int>(static_cast<u32>(product >> 32) >> d.shift);
}

struct TilesParams {
  const u32* bitmap;
  const i32* q_starts;   // (mask heads, nq + 1) first row of each block, and the end; null: uniform
  const i32* kv_starts;  // (mask heads, nk + 1), the same of columns
  Classes* classes;      // (tiles,) scratch
  i32* tile_q;           // (tiles, 2): first row of the head, word of rows (types.cuh)
  i32* tile_frags;       // (tiles,) length of the list, padding included
  i32* tile_steps;       // (tiles,)
  i64* frag_offsets;     // (tiles + 1,)
  Fragment* frags;       // (frag_capacity,)
  Task* tasks;           // (task_capacity,)
  Turn* turns;           // (task_capacity,) scratch
  i32* pair_slots;       // (pairs,) scratch
  i32* merge_head;       // (merge_capacity,)
  i32* merge_tile;       // (merge_capacity,)
  i32* merge_offsets;    // (merge_capacity + 1,)
  i64* counts;           // (8,), as in TileCount; the rest is 0
  i64 stamp;
  i64 frag_capacity;
  i32 task_capacity;
  i32 merge_capacity;
  i32 tiles;
  i32 head_tiles;  // tiles of one mask head
  i32 nq;
  i32 nk;
  i32 words;  // of a row of the bitmap
  i32 sq;
  i32 skv;
  i32 q_block;  // of a ragged side, the largest block
  i32 kv_block;
  i32 joined;     // query blocks of a tile, or 1
  i32 parts;      // tiles of a query block, or 1
  i32 tile_rows;  // of a whole tile
  i32 slot;       // columns of a fragment
  i32 per_step;   // fragments of a step
  i32 share;      // 1: lists by class
  i32 pairs;
  i32 q_heads;
  i32 mask_batch;
  i32 mask_heads;
  i32 group_pairs;  // pairs of the heads that L2 holds together
  i32 capacity;     // CTAs of the attention kernel that run at a time
  i32 groups;       // of pairs; the last may be smaller
  i32 part_steps;   // of the shortest part of a tile
  i32 halves;       // 1: a tile's two blocks are its halves
  i32 ctas_per_sm;  // of the attention kernel
  // What its name says.
  Divisor by_head_tiles;
  Divisor by_q_heads;
  Divisor by_parts;
  Divisor by_slot;
  Divisor by_per_step;
  Divisor by_capacity;
  // Of single keys (slice_fragments.cu): (frag_capacity, slot), a place for each column.
  i32* rows;
};

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Which rows a tile has: of a mask head, `blocks` query blocks from `block` on; none without rows.
struct TileRows {
  i32 head;
  i32 block;
  i32 blocks;
  i32 first;
  i32 rows;
  i32 half;  // rows of the first of two halves, or -1
};

__device__ __forceinline__ i32 word_of_rows(const TileRows& tile) {
  if (tile.half < 0) return tile.rows;
  return tile.rows > 0 ? word_of_halves(tile.half, tile.rows) : 0;
}

__device__ __forceinline__ const i32* q_starts_of(const TilesParams& p, int head) {
  return p.q_starts + static_cast<i64>(head) * (p.nq + 1);
}

__device__ __forceinline__ const i32* kv_starts_of(const TilesParams& p, int head) {
  return p.kv_starts + static_cast<i64>(head) * (p.nk + 1);
}

template <bool kRagged>
__device__ __forceinline__ TileRows tile_rows(const TilesParams& p, int tile) {
  const int head = tile / p.by_head_tiles;
  const int index = tile - head * p.head_tiles;
  const int whole = index / p.by_parts;
  const int block = whole * p.joined;
  const int lead = (index - whole * p.parts) * p.tile_rows;
  if (kRagged && p.q_starts != nullptr) {
    const i32* starts = q_starts_of(p, head) + block;
    const int blocks = min(p.joined, p.nq - block);
    const int begin = starts[0] + lead;
    const int rows = max(0, min(p.tile_rows, starts[blocks] - begin));
    const int half = p.halves ? starts[1] - starts[0] : -1;
    return {head, block, rows > 0 ? blocks : 0, begin, rows, half};
  }
  const int first = block * p.q_block + lead;
  const int most = min(p.tile_rows, p.joined * p.q_block - lead);
  return {head, block, min(p.joined, p.nq - block), first, min(most, p.sq - first), -1};
}

// Fragments of so many columns of a block.
__device__ __forceinline__ int fragments_of(const TilesParams& p, int columns) {
  return (columns + p.slot - 1) / p.by_slot;
}

// Runs of neighbouring ragged blocks, the lowest first.
struct Runs {
  u32 opens;   // a bit for each run's first block
  u32 closes;  // and for its last

  // Of a class's word; `apart` as in ClassWords.
  __device__ __forceinline__ Runs(u32 word, u32 apart)
      : opens(word & apart), closes(word & ~((word & ~apart) >> 1)) {}
  __device__ __forceinline__ bool any() const { return opens != 0; }
  __device__ __forceinline__ void next() {
    opens &= opens - 1;
    closes &= closes - 1;
  }
  __device__ __forceinline__ int first() const { return __ffs(opens) - 1; }
  // Where the first run begins and ends; `starts` is that of the lowest bit's block.
  __device__ __forceinline__ int begin(const i32* starts) const { return starts[first()]; }
  __device__ __forceinline__ int end(const i32* starts) const { return starts[__ffs(closes)]; }
};

// Fragments of all of them.
__device__ __forceinline__ int ragged_fragments(const TilesParams& p, const i32* starts,
                                                Runs runs) {
  int fragments = 0;
#pragma unroll 1
  for (; runs.any(); runs.next())
    fragments += fragments_of(p, runs.end(starts) - runs.begin(starts));
  return fragments;
}

// Membership word of the tile's query block s.
template <bool kRagged>
__device__ __forceinline__ u32 block_members(const TilesParams& p, const TileRows& tile, int s) {
  if (kRagged && tile.half >= 0) {
    const int of_half = s == 0 ? tile.half : tile.rows - tile.half;
    const u32 groups = (1u << ceil_div(of_half, kGroupRows)) - 1;
    return s == 0 ? groups : groups << (p.tile_rows / (2 * kGroupRows));
  }
  int begin = s * p.q_block;
  int end = begin + p.q_block;
  if (kRagged && p.q_starts != nullptr && p.joined > 1) {
    const i32* starts = q_starts_of(p, tile.head) + tile.block + s;
    begin = starts[0] - tile.first;
    end = starts[1] - tile.first;
  }
  const int low = begin / kGroupRows;
  const int high = ceil_div(min(end, tile.rows), kGroupRows);
  return (1u << high) - (1u << low);
}

// The row of the bitmap of a tile's first query block.
__device__ __forceinline__ const u32* bitmap_rows(const TilesParams& p, const TileRows& tile) {
  return p.bitmap + (static_cast<i64>(tile.head) * p.nq + tile.block) * p.words;
}

// What `take` is given of each of a tile's query blocks: its number, and 32 columns of its row of
// the bitmap, of which `word` is the first block's. Four reads at a time do not wait for each
// other.
template <typename Take>
__device__ __forceinline__ void each_block(const TilesParams& p, const TileRows& tile,
                                           const u32* word, Take take) {
  constexpr int kReads = 4;
#pragma unroll 1
  for (int s = 0; s < tile.blocks; s += kReads) {
    u32 words[kReads];
#pragma unroll
    for (int j = 0; j < kReads; ++j) words[j] = s + j < tile.blocks ? word[(s + j) * p.words] : 0;
#pragma unroll
    for (int j = 0; j < kReads; ++j) {
      if (s + j < tile.blocks) take(s + j, words[j]);
    }
  }
}

// 32 block columns of a tile's list, by class.
struct ClassWords {
  u32 both;
  u32 first;
  u32 second;
  u32 apart;  // kRagged: columns whose members are not those of the column before, or the first
};

template <bool kRagged>
__device__ __forceinline__ ClassWords class_words(const TilesParams& p, const TileRows& tile,
                                                  const u32* rows, int index) {
  const u32 first_half = (1u << (p.tile_rows / (2 * kGroupRows))) - 1;
  u32 in_first = 0;
  u32 in_second = 0;
  u32 apart = 0;
  if (index < p.words) {
    each_block(p, tile, rows + index, [&](int s, u32 word) {
      if constexpr (kRagged) apart |= word ^ (word << 1);
      const u32 members = block_members<kRagged>(p, tile, s);
      if (!p.share || (members & first_half) != 0) in_first |= word;
      if (!p.share || (members & ~first_half) != 0) in_second |= word;
    });
  }
  return {in_first & in_second, in_first & ~in_second, in_second & ~in_first, apart};
}

// How a list is cut into steps; see _fillers in mapping/share.py.
struct Layout {
  i32 both;   // fragments of the class
  i32 first;  // fragments of the class that stay in its steps
  i32 second;
  i32 of_first;  // the last ones of the class, which fill steps of both
  i32 of_second;
  i32 both_steps;
  i32 first_steps;
  i32 second_steps;
};

__device__ __forceinline__ Layout lay_out(const TilesParams& p, const Classes& count) {
  const int per_step = p.per_step;
  Layout list{};
  list.both = count.both;
  list.both_steps = count.both / p.by_per_step;
  const int both_rest = count.both - list.both_steps * per_step;
  list.both_steps += both_rest > 0;
  if (!p.share) return list;
  const int room = both_rest > 0 ? per_step - both_rest : 0;
  list.first_steps = count.first / p.by_per_step;
  list.second_steps = count.second / p.by_per_step;
  const int first_rest = count.first - list.first_steps * per_step;
  const int second_rest = count.second - list.second_steps * per_step;
  // Steps that the rests add to those of both.
  auto steps_more = [&](int rests) { return (rests > room) + (rests > room + per_step); };
  int best = 0;
  int least = 0x7fffffff;
#pragma unroll
  for (int choice = 0; choice < 4; ++choice) {
    const int of_first = choice & 1 ? first_rest : 0;
    const int of_second = choice & 2 ? second_rest : 0;
    const int more = steps_more(of_first + of_second);
    const int alone = more + (of_first < first_rest) + (of_second < second_rest);
    const int shorter = choice == 1   ? count.first < count.second
                        : choice == 2 ? count.first >= count.second
                                      : 0;
    const int cost = 8 * (more + alone) + 2 * alone + shorter;
    if (cost < least) {
      least = cost;
      best = choice;
    }
  }
  list.of_first = best & 1 ? first_rest : 0;
  list.of_second = best & 2 ? second_rest : 0;
  list.first = count.first - list.of_first;
  list.second = count.second - list.of_second;
  list.both_steps += steps_more(list.of_first + list.of_second);
  list.first_steps += list.of_first < first_rest;
  list.second_steps += list.of_second < second_rest;
  return list;
}

// Fragments of each class of so many keys.
__device__ __forceinline__ Classes fragments_of_keys(const TilesParams& p, const Classes& keys) {
  return {fragments_of(p, keys.both), fragments_of(p, keys.first), fragments_of(p, keys.second), 0};
}

// 32 single keys of a tile's list, by class: of the one group that it has, or of its two halves.
__device__ __forceinline__ ClassWords key_words(const TilesParams& p, const TileRows& tile,
                                                const u32* rows, int index) {
  const u32 first = index < p.words ? rows[index] : 0;
  if (!p.share) return {first, 0, 0};
  const u32 second = index < p.words && tile.blocks > 1 ? rows[p.words + index] : 0;
  return {first & second, first & ~second, second & ~first};
}

struct HeadTile {
  i32 head;
  i32 tile;
};

__device__ __forceinline__ HeadTile head_tile(const TilesParams& p, int pair) {
  const int head = pair / p.by_head_tiles;
  const int of_request = head / p.by_q_heads;
  const int batch = p.mask_batch > 1 ? of_request : 0;
  const int of_batch = p.mask_heads > 1 ? head - of_request * p.q_heads : 0;
  const int mask_head = batch * p.mask_heads + of_batch;
  return {head, mask_head * p.head_tiles + (pair - head * p.head_tiles)};
}

// First step of a part: steps * part / parts, without a 64-bit product.
__device__ __forceinline__ int part_begin(int steps, int parts, int part) {
  return steps / parts * part + steps % parts * part / parts;
}

}  // namespace tessera
