// A mask's bitmap in GPU memory to the tiles and tasks of the attention kernels, equal to what
// mapping/ and organization/ make of it on the host: uniform blocks, no token bits, KV side pack.
//
//   bitmap  u32 [mask heads][nq][words]: bit c % 32 of word c / 32 is block column c, 0 past nk.
//   tile    `joined` neighbouring query blocks (merge, share), one block (retain), or one of
//           `parts` of a block (split). Its list is the union of its blocks' rows; an entry is
//           ceil(kv_block / slot) fragments, fewer in a short last block.
//   share   fragments of both halves of the tile's rows, of the first alone, of the second alone:
//           three classes, each padded to whole steps (mapping/share.py). Elsewhere all are `both`.
//   pair    a query head and a tile of its mask head. A task is a pair, or one of its split-K
//           parts.
//
// Three kernels, each launched once, with sizes that follow from the geometry alone:
//   tile_counts     a warp a tile: fragments of each class, length and steps of the list.
//   tile_scan       one CTA: where each list begins; tasks in launch order (longest first inside
//                   each group of heads, split, last round), merge arrays, counts.
//   tile_fragments  a warp a tile: the list; a thread a task: the record.
// An output that is too small is flagged in the counts; then there are no tasks, and nothing is
// written past any output's end.
//
// All numbers are integers, and no result depends on the order in which threads run.
//
// Shared memory: tile_scan has TileScanStorage, tile_fragments 2 KB a warp.
#pragma once

#include "common/types.cuh"

namespace tessera {

inline constexpr u32 kAllLanes = 0xffffffffu;

// What the host reads back. The errors are where a mask's scalars have them.
enum TileCount { kFragments, kTasks, kMerges, kSlots, kErrors };
inline constexpr i64 kTooSmall = 4;

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

struct TilesParams {
  const u32* bitmap;
  Classes* classes;    // (tiles,)
  i32* tile_frags;     // (tiles,) length of the list, padding included
  i32* tile_steps;     // (tiles,)
  i64* frag_offsets;   // (tiles + 1,)
  Fragment* frags;     // (frag_capacity,)
  Task* tasks;         // (task_capacity,)
  Turn* turns;         // (task_capacity,) scratch
  i32* pair_slots;     // (pairs,) scratch
  i32* merge_head;     // (merge_capacity,)
  i32* merge_tile;     // (merge_capacity,)
  i32* merge_offsets;  // (merge_capacity + 1,)
  i64* counts;         // (8,), as in TileCount; the rest is 0
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
  i32 q_block;
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
};

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

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

template <typename T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

__device__ __forceinline__ int warp_max(int value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    value = max(value, __shfl_xor_sync(kAllLanes, value, step));
  }
  return value;
}

// Which rows a tile has: of a mask head, `blocks` query blocks from `block` on.
struct TileRows {
  i32 head;
  i32 block;
  i32 blocks;
  i32 first;
  i32 rows;
};

__device__ __forceinline__ TileRows tile_rows(const TilesParams& p, int tile) {
  const int head = tile / p.head_tiles;
  const int index = tile - head * p.head_tiles;
  const int block = index / p.parts * p.joined;
  const int lead = index % p.parts * p.tile_rows;
  const int first = block * p.q_block + lead;
  const int most = min(p.tile_rows, p.joined * p.q_block - lead);
  return {head, block, min(p.joined, p.nq - block), first, min(most, p.sq - first)};
}

// Membership word of the tile's query block s.
__device__ __forceinline__ u32 block_members(const TilesParams& p, const TileRows& tile, int s) {
  const int low = s * p.q_block / kGroupRows;
  const int high = ceil_div(min((s + 1) * p.q_block, tile.rows), kGroupRows);
  return (1u << high) - (1u << low);
}

// The row of the bitmap of a tile's first query block.
__device__ __forceinline__ const u32* bitmap_rows(const TilesParams& p, const TileRows& tile) {
  return p.bitmap + (static_cast<i64>(tile.head) * p.nq + tile.block) * p.words;
}

// 32 block columns of a tile's list, by class.
struct ClassWords {
  u32 both;
  u32 first;
  u32 second;
};

__device__ __forceinline__ ClassWords class_words(const TilesParams& p, const TileRows& tile,
                                                  const u32* rows, int index) {
  const u32 first_half = (1u << (p.tile_rows / (2 * kGroupRows))) - 1;
  u32 in_first = 0;
  u32 in_second = 0;
#pragma unroll 4
  for (int s = 0; s < tile.blocks; ++s) {
    const u32 members = block_members(p, tile, s);
    const u32 word = index < p.words ? rows[s * p.words + index] : 0;
    if (!p.share || (members & first_half) != 0) in_first |= word;
    if (!p.share || (members & ~first_half) != 0) in_second |= word;
  }
  return {in_first & in_second, in_first & ~in_second, in_second & ~in_first};
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
  list.both_steps = count.both / per_step;
  const int both_rest = count.both - list.both_steps * per_step;
  list.both_steps += both_rest > 0;
  if (!p.share) return list;
  const int room = both_rest > 0 ? per_step - both_rest : 0;
  list.first_steps = count.first / per_step;
  list.second_steps = count.second / per_step;
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

__device__ __forceinline__ void tile_counts(const TilesParams& p) {
  const int lane = threadIdx.x & 31;
  const int tile = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5);
  if (tile >= p.tiles) return;
  const TileRows rows = tile_rows(p, tile);
  const u32* bitmap = bitmap_rows(p, rows);
  const int most = ceil_div(p.kv_block, p.slot);
  const int missing = most - ceil_div(p.skv - (p.nk - 1) * p.kv_block, p.slot);
  Classes count{};
  for (int index = lane; index < p.words; index += 32) {
    const ClassWords words = class_words(p, rows, bitmap, index);
    const bool last = index == p.words - 1;
    auto fragments = [&](u32 word) {
      const bool tail = last && (word >> ((p.nk - 1) & 31) & 1) != 0;
      return __popc(word) * most - (tail ? missing : 0);
    };
    count.both += fragments(words.both);
    count.first += fragments(words.first);
    count.second += fragments(words.second);
  }
  count.both = warp_sum(count.both);
  count.first = warp_sum(count.first);
  count.second = warp_sum(count.second);
  if (lane != 0) return;
  const Layout list = lay_out(p, count);
  const int steps = list.both_steps + list.first_steps + list.second_steps;
  p.classes[tile] = count;
  p.tile_frags[tile] = p.share ? steps * p.per_step : count.both;
  p.tile_steps[tile] = steps;
}

// ---- tasks: organization.organize with longest and split ---------------------------------------

// As in organization/organize.py.
inline constexpr int kPartsPerCta = 4;
inline constexpr int kMinPartSteps = 8;
inline constexpr int kFewestParts = 2;  // of a turn of the last round
inline constexpr int kMostParts = 4;

// Lengths are compared by the 1/16-wide bucket that they are in: how many edges they reach.
inline constexpr int kBuckets = 256;
struct Edges {
  i32 at[kBuckets];
};
constexpr Edges make_edges() {
  Edges edges{};
  int edge = 1;
  for (int i = 0; i < kBuckets; ++i) {
    edges.at[i] = edge;
    edge = edge * 17 / 16 > edge ? edge * 17 / 16 : edge + 1;
  }
  return edges;
}
__device__ constexpr Edges kEdges = make_edges();

// Turns of the last round are fewer than the CTAs that run at a time.
inline constexpr int kMaxCapacity = 4096;

template <int kWarps>
struct TileScanStorage {
  union {
    u32 bucket[kWarps][kBuckets];  // tasks of each warp's pairs; then the place of the next one
    Turn last[kMaxCapacity];
  };
  i32 edges[kBuckets];
  i64 sums[kWarps];
  i32 group_tasks[kWarps];
  // For each number of parts: turns to cut, the longest of those, the longest of the others.
  i32 choices[kMostParts - kFewestParts + 1][3];
  i32 any_cut;
};

// Exclusive sums of load(0), load(1), ... go to store(index, sum). Returns the total.
// load and store are called by all threads in turn, and a warp's lanes have neighbouring indices.
template <int kWarps, typename Load, typename Store>
__device__ __forceinline__ i64 scan_all(i64 (&sums)[kWarps], int count, Load load, Store store) {
  constexpr int kRun = 4;  // of a lane at a time; 8 spill on some architectures
  static_assert(kWarps == 32, "one lane for each warp's sum");
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  i64 done = 0;
  for (int base = 0; base < count; base += kWarps * 32 * kRun) {
    const int begin = base + warp * 32 * kRun + lane;
    i32 before[kRun];
#pragma unroll
    for (int j = 0; j < kRun; ++j) before[j] = begin + 32 * j < count ? load(begin + 32 * j) : 0;
    i32 total = 0;
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
      // Most pairs are not cut, and then there is nothing to add up.
      const bool any = __any_sync(kAllLanes, before[j] != 0);
      const i32 upto = any ? warp_scan(before[j]) : 0;
      before[j] = total + upto - before[j];
      total += __shfl_sync(kAllLanes, upto, 31);
    }
    if (lane == 0) sums[warp] = total;
    __syncthreads();
    const i64 upto = warp_scan(sums[lane]);
    const i64 start = done + __shfl_sync(kAllLanes, upto, warp) - total;
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
      if (begin + 32 * j < count) store(begin + 32 * j, start + before[j]);
    }
    done += __shfl_sync(kAllLanes, upto, 31);
    __syncthreads();
  }
  return done;
}

struct HeadTile {
  i32 head;
  i32 tile;
};

__device__ __forceinline__ HeadTile head_tile(const TilesParams& p, int pair) {
  const int head = pair / p.head_tiles;
  const int batch = p.mask_batch > 1 ? head / p.q_heads : 0;
  const int of_batch = p.mask_heads > 1 ? head % p.q_heads : 0;
  const int mask_head = batch * p.mask_heads + of_batch;
  return {head, mask_head * p.head_tiles + (pair - head * p.head_tiles)};
}

__device__ __forceinline__ int pair_steps(const TilesParams& p, int pair) {
  return p.tile_steps[p.pairs == p.tiles ? pair : head_tile(p, pair).tile];
}

// First step of a part: steps * part / parts, without a 64-bit product.
__device__ __forceinline__ int part_begin(int steps, int parts, int part) {
  return steps / parts * part + steps % parts * part / parts;
}

__device__ __forceinline__ int part_steps(int steps, int parts, int part) {
  return parts == 1 ? steps : part_begin(steps, parts, part + 1) - part_begin(steps, parts, part);
}

__device__ __forceinline__ int bucket_of(const i32 (&edges)[kBuckets], int steps) {
  int bucket = 0;
#pragma unroll
  for (int step = kBuckets / 2; step > 0; step /= 2) {
    if (edges[bucket + step - 1] <= steps) bucket += step;
  }
  return bucket;
}

// A warp visits the tasks of pairs [begin, end) in order, 32 at a time, all lanes together:
// visit(on, turn, key). parts_or_key(pair) is the number of parts of a pair that is cut, or ~key.
template <typename PartsOrKey, typename Visit>
__device__ __forceinline__ void each_task(const TilesParams& p, const i32 (&edges)[kBuckets],
                                          int begin, int end, PartsOrKey parts_or_key,
                                          Visit visit) {
  const int lane = threadIdx.x & 31;
#pragma unroll 1
  for (int base = begin; base < end; base += 32) {
    const bool on = base + lane < end;
    const int value = on ? parts_or_key(base + lane) : ~0;
    const bool cut = __any_sync(kAllLanes, value > 0);
    const int tasks = value > 0 ? value : on;
    const int upto = cut ? warp_scan(tasks) : lane + 1;
    const int total = cut ? __shfl_sync(kAllLanes, upto, 31) : min(32, end - base);
#pragma unroll 1
    for (int first = 0; first < total; first += 32) {
      const int index = first + lane;
      int owner = lane;
      int part = 0;
      int parts = 1;
      int key = ~value;
      if (cut) {
        owner = 0;
#pragma unroll
        for (int step = 16; step > 0; step /= 2) {
          if (__shfl_sync(kAllLanes, upto, owner + step - 1) <= index) owner += step;
        }
        parts = __shfl_sync(kAllLanes, tasks, owner);
        part = index - (__shfl_sync(kAllLanes, upto, owner) - parts);
        key = ~__shfl_sync(kAllLanes, value, owner);
        if (parts > 1 && index < total) {
          key = bucket_of(edges, part_steps(pair_steps(p, base + owner), parts, part));
        }
      }
      visit(index < total, Turn{base + owner, static_cast<u16>(part), static_cast<u16>(parts)},
            key);
    }
  }
}

// Writes the turns in launch order, and to pair_slots the parts of pairs that are cut; of others,
// what is not above 0. Returns the number of turns.
template <int kWarps>
__device__ __forceinline__ int order_turns(const TilesParams& p, TileScanStorage<kWarps>& shared,
                                           int limit) {
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  const u32 lower_lanes = (1u << lane) - 1;
  // Several warps share a group of heads, or a warp takes a group, and another in the next round.
  const int groups = ceil_div(p.pairs, p.group_pairs);
  const int ways = max(1, kWarps / max(1, groups));
  const int segment = ceil_div(ceil_div(p.group_pairs, ways), 32) * 32;
  u32(&bucket)[kBuckets] = shared.bucket[warp];
  int done = 0;
  for (int first_group = 0; first_group < groups; first_group += kWarps / ways) {
    const int group = first_group + warp / ways;
    const bool works = warp / ways < kWarps / ways && group < groups;
    const int end_of_group = works ? min(p.pairs, (group + 1) * p.group_pairs) : 0;
    const int begin = works ? group * p.group_pairs + warp % ways * segment : 0;
    const int end = min(begin + segment, end_of_group);

    for (int i = lane; i < kBuckets; i += 32) bucket[i] = 0;
    if (lane == 0) shared.group_tasks[warp] = 0;
    __syncwarp();
    each_task(
        p, shared.edges, begin, end,
        [&](int pair) {
          const int steps = pair_steps(p, pair);
          // Tiles up to half above the limit stay whole.
          const bool cut = 2 * steps > 3 * limit;
          const int value = cut ? ceil_div(steps, limit) : ~bucket_of(shared.edges, steps);
          if (cut) shared.any_cut = 1;
          p.pair_slots[pair] = value;
          return value;
        },
        [&](bool on, Turn, int key) {
          if (on) atomicAdd(&bucket[key], 1u);
        });
    __syncthreads();

    // The first warp of a group: longest first, and inside a bucket in the order of pairs.
    if (works && warp % ways == 0) {
      u32 place = 0;
      for (int i = 0; i < kBuckets; i += 32) {
        const int index = kBuckets - 1 - i - lane;
        u32 total = 0;
        for (int way = 0; way < ways; ++way) total += shared.bucket[warp + way][index];
        const u32 upto = warp_scan(total);
        u32 next = place + upto - total;
        for (int way = 0; way < ways; ++way) {
          const u32 count = shared.bucket[warp + way][index];
          shared.bucket[warp + way][index] = next;
          next += count;
        }
        place += __shfl_sync(kAllLanes, upto, 31);
      }
      if (lane == 0) shared.group_tasks[warp / ways] = place;
    }
    __syncthreads();

    const int tasks = shared.group_tasks[lane];
    const int upto = warp_scan(tasks);
    const int group_lane = min(warp / ways, 31);
    const int group_begin = done + __shfl_sync(kAllLanes, upto - tasks, group_lane);
    each_task(
        p, shared.edges, begin, end, [&](int pair) { return p.pair_slots[pair]; },
        [&](bool on, Turn turn, int key) {
          u32 same = __ballot_sync(kAllLanes, on);
#pragma unroll
          for (int bit = 1; bit < kBuckets; bit *= 2) {
            const u32 set = __ballot_sync(kAllLanes, (key & bit) != 0);
            same &= key & bit ? set : ~set;
          }
          const u32 place = on ? bucket[key] + __popc(same & lower_lanes) : 0;
          __syncwarp();
          if (on) {
            if ((same & lower_lanes) == 0) bucket[key] += __popc(same);
            const i64 index = static_cast<i64>(group_begin) + place;
            if (index < p.task_capacity) p.turns[index] = turn;
          }
          __syncwarp();
        });
    done += __shfl_sync(kAllLanes, upto, 31);
    __syncthreads();
  }
  return done;
}

// Cuts whole tiles of the last round in parts that come last; see _last_round in
// organization/organize.py. Returns the number of turns.
template <int kWarps>
__device__ __forceinline__ int cut_last_round(const TilesParams& p, TileScanStorage<kWarps>& shared,
                                              int turns) {
  const int lane = threadIdx.x & 31;
  const int rest = turns % p.capacity;
  const int first = turns - rest;
  const int last_group = (p.pairs - 1) / p.group_pairs * p.group_pairs;
  auto may_cut = [&](Turn turn, int steps, int parts) {
    return turn.parts == 1 && turn.pair >= last_group && steps >= parts * kMinPartSteps;
  };

  for (int i = threadIdx.x; i < rest; i += kWarps * 32) shared.last[i] = p.turns[first + i];
#pragma unroll 1
  for (int parts = kFewestParts; parts <= kMostParts; ++parts) {
    int count = 0;
    int longest_cut = 0;
    int longest_left = 0;
    for (int i = threadIdx.x; i < rest; i += kWarps * 32) {
      const Turn turn = shared.last[i];
      const int length = part_steps(pair_steps(p, turn.pair), turn.parts, turn.part);
      const bool cut = may_cut(turn, length, parts);
      count += cut;
      longest_cut = max(longest_cut, cut ? length : 0);
      longest_left = max(longest_left, cut ? 0 : length);
    }
    count = warp_sum(count);
    longest_cut = warp_max(longest_cut);
    longest_left = warp_max(longest_left);
    i32(&choice)[3] = shared.choices[parts - kFewestParts];
    if (lane == 0) {
      atomicAdd(&choice[0], count);
      atomicMax(&choice[1], longest_cut);
      atomicMax(&choice[2], longest_left);
    }
  }
  __syncthreads();

  const int longest = max(shared.choices[0][1], shared.choices[0][2]);
  int time = longest;
  int parts = 1;
  int cuts = 0;
#pragma unroll 1
  for (int k = kFewestParts; k <= kMostParts; ++k) {
    const i32(&choice)[3] = shared.choices[k - kFewestParts];
    const int rounds = ceil_div(rest - choice[0] + k * choice[0], p.capacity);
    const int one_part = ceil_div(choice[1], k);
    const int end = max(one_part, choice[2]) + (rounds - 1) * one_part;
    if (end < time && 10 * (longest - end) >= longest) {
      time = end;
      parts = k;
      cuts = choice[0];
    }
  }
  const int total = turns + (parts - 1) * cuts;
  // One warp moves the others up and puts the parts behind them, in order.
  if (parts > 1 && total <= p.task_capacity && threadIdx.x < 32) {
    const u32 lower_lanes = (1u << lane) - 1;
    int stays = first;
    int goes = turns - cuts;
    for (int base = 0; base < rest; base += 32) {
      const bool on = base + lane < rest;
      const Turn turn = on ? shared.last[base + lane] : Turn{};
      const bool cut = on && may_cut(turn, pair_steps(p, turn.pair), parts);
      const u32 cut_lanes = __ballot_sync(kAllLanes, cut);
      const u32 other_lanes = __ballot_sync(kAllLanes, on && !cut);
      if (cut) {
        const int place = goes + __popc(cut_lanes & lower_lanes) * parts;
        for (int part = 0; part < parts; ++part) {
          p.turns[place + part] = {turn.pair, static_cast<u16>(part), static_cast<u16>(parts)};
        }
        p.pair_slots[turn.pair] = parts;
      } else if (on) {
        p.turns[stays + __popc(other_lanes & lower_lanes)] = turn;
      }
      stays += __popc(other_lanes);
      goes += __popc(cut_lanes) * parts;
    }
    if (lane == 0) shared.any_cut = 1;
  }
  __syncthreads();
  return total;
}

template <int kWarps>
__device__ __forceinline__ void tile_scan(const TilesParams& p) {
  extern __shared__ __align__(1024) u8 dynamic_smem[];
  TileScanStorage<kWarps>& shared = *reinterpret_cast<TileScanStorage<kWarps>*>(dynamic_smem);
  const int thread = threadIdx.x;
  for (int i = thread; i < kBuckets; i += kWarps * 32) shared.edges[i] = kEdges.at[i];
  if (thread < 3 * (kMostParts - kFewestParts + 1)) shared.choices[thread / 3][thread % 3] = 0;
  if (thread == 0) shared.any_cut = 0;

  i64 steps = 0;
  const i64 frags = scan_all(
      shared.sums, p.tiles,
      [&](int tile) {
        steps += p.tile_steps[tile];
        return p.tile_frags[tile];
      },
      [&](int tile, i64 before) { p.frag_offsets[tile] = before; });
  steps = warp_sum(steps);
  if ((thread & 31) == 0) shared.sums[thread >> 5] = steps;
  __syncthreads();
  // Heads that share a mask head have its tiles each.
  const i64 all_steps = warp_sum(shared.sums[thread & 31]) * (p.pairs / max(1, p.tiles));
  __syncthreads();

  bool fits = frags <= p.frag_capacity;
  int turns = 0;
  i64 cut = 0;  // merged tiles in the upper half word, their parts in the lower
  if (fits) {
    const i64 share = static_cast<i64>(kPartsPerCta) * p.capacity;
    const i64 fair = (all_steps + share - 1) / share;
    const int limit = fair > kMinPartSteps ? static_cast<int>(fair) : kMinPartSteps;
    turns = order_turns<kWarps>(p, shared, limit);
    fits = turns <= p.task_capacity;
    if (fits && p.pairs > p.capacity) {
      turns = cut_last_round<kWarps>(p, shared, turns);
      fits = turns <= p.task_capacity;
    }
    // Slots follow the pairs, not the launch order: merging reads them from first to last.
    if (fits && shared.any_cut) {
      cut = scan_all(
          shared.sums, p.pairs,
          [&](int pair) {
            const i32 parts = p.pair_slots[pair];
            return parts > 0 ? parts + 0x10000 : 0;
          },
          [&](int pair, i64 before) {
            if (p.pair_slots[pair] <= 0) return;
            const int merge = static_cast<int>(before >> 16);
            const int slot = static_cast<int>(before & 0xffff);
            p.pair_slots[pair] = slot;
            if (merge < p.merge_capacity) {
              const HeadTile of = head_tile(p, pair);
              p.merge_head[merge] = of.head;
              p.merge_tile[merge] = of.tile;
              p.merge_offsets[merge] = slot;
            }
          });
      fits = cut >> 16 <= p.merge_capacity;
    }
  }
  if (thread != 0) return;
  p.frag_offsets[p.tiles] = frags;
  const i64 merges = fits ? cut >> 16 : 0;
  const i64 slots = fits ? cut & 0xffff : 0;
  p.merge_offsets[merges] = static_cast<i32>(slots);
  p.counts[kFragments] = frags;
  p.counts[kTasks] = fits ? turns : 0;
  p.counts[kMerges] = merges;
  p.counts[kSlots] = slots;
  p.counts[kErrors] = fits ? 0 : kTooSmall;
  for (int i = kErrors + 1; i < 8; ++i) p.counts[i] = 0;
}

// ---- lists and records -------------------------------------------------------------------------

__device__ __forceinline__ void write_tasks(const TilesParams& p) {
  const i64 count = p.counts[kTasks];
  const i64 threads = static_cast<i64>(gridDim.x) * blockDim.x;
  for (i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += threads) {
    const Turn turn = p.turns[i];
    const HeadTile of = head_tile(p, turn.pair);
    const TileRows rows = tile_rows(p, of.tile);
    const int steps = p.tile_steps[of.tile];
    Task task;
    task.head = of.head;
    task.begin = part_begin(steps, turn.parts, turn.part);
    task.end = part_begin(steps, turn.parts, turn.part + 1);
    task.slot = turn.parts > 1 ? p.pair_slots[turn.pair] + turn.part : -1;
    task.reverse = 0;
    task.first_row = rows.first;
    task.rows = rows.rows;
    task.frag_count = p.tile_frags[of.tile];
    task.frag_begin = p.frag_offsets[of.tile];
    task.units = -1;
    p.tasks[i] = task;
  }
}

// One tile's list as it is written.
struct ListWriter {
  u64* frags;  // of the tile's list
  i32 room;    // fragments that the output has from there on
  i32 per_step;

  __device__ __forceinline__ void put(int index, u32 start, u32 info) const {
    if (index < room) frags[index] = static_cast<u64>(info) << 32 | start;
  }
  // Step and place of fragment i of a half's class, which is in the half's step i / per_step: such
  // steps follow those of both, and take turns with the `other` half's, to which the first belongs.
  __device__ __forceinline__ int alone(int both_steps, int i, int other, int late) const {
    const int step = i / per_step;
    return (both_steps + step + min(step + late, other)) * per_step + i - step * per_step;
  }
  __device__ __forceinline__ void pad(int begin, int end) const {
    for (int i = begin + (threadIdx.x & 31); i < end; i += 32) put(i, 0, 0);
  }
};

// Appends the positions of the set bits, from `base` on, to a list.
__device__ __forceinline__ void append_bits(u16* list, u32 word, int base) {
  for (; word != 0; word &= word - 1) *list++ = static_cast<u16>(base + __ffs(word) - 1);
}

// A lane takes a word of the bitmap, and a warp the entries of its 32 words class by class.
template <int kWarps>
__device__ __forceinline__ void tile_fragments(const TilesParams& p) {
  extern __shared__ __align__(1024) u8 dynamic_smem[];
  constexpr int kEntries = 32 * 32;
  write_tasks(p);
  const int lane = threadIdx.x & 31;
  const int tile = blockIdx.x * kWarps + (threadIdx.x >> 5);
  if (tile >= p.tiles) return;
  u16* entries = reinterpret_cast<u16*>(dynamic_smem) + (threadIdx.x >> 5) * kEntries;
  const TileRows rows = tile_rows(p, tile);
  const u32* bitmap = bitmap_rows(p, rows);
  const Layout list = lay_out(p, p.classes[tile]);
  const i64 begin = p.frag_offsets[tile];
  const i64 room = p.frag_capacity - begin;
  const ListWriter writer{reinterpret_cast<u64*>(p.frags) + begin,
                          room < 0            ? 0
                          : room < 0x7fffffff ? static_cast<i32>(room)
                                              : 0x7fffffff,
                          p.per_step};
  const int most = ceil_div(p.kv_block, p.slot);

  // Entries of the classes so far.
  int both = 0;
  int first = 0;
  int second = 0;
  for (int base = 0; base < p.words; base += 32) {
    const ClassWords words = class_words(p, rows, bitmap, base + lane);
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
    for (int k = lane; k < here; k += 32) {
      const int entry = entries[k];
      const u32* word = bitmap + base + (entry >> 5);
      u32 members = 0;
#pragma unroll 4
      for (int s = 0; s < rows.blocks; ++s) {
        if (word[s * p.words] >> (entry & 31) & 1) members |= block_members(p, rows, s);
      }
      const bool of_second = k >= halves_begin;
      const bool of_half = k >= both_here;
      const int rank = k + (of_second ? second - halves_begin : of_half ? first - both_here : both);
      // The first `kept` fragments of a half stay in its steps; the others, and both's, follow
      // each other from `moved` on.
      const int kept = of_second ? list.second : of_half ? list.first : 0;
      const int moved = of_second ? list.both + list.of_first : of_half ? list.both : 0;
      const int other = of_second ? list.first_steps : list.second_steps;
      const int start = (base * 32 + entry) * p.kv_block;
      const int width = min(p.kv_block, p.skv - start);
      for (int j = 0; j * p.slot < width; ++j) {
        const int i = rank * most + j;
        const int place =
            i < kept ? writer.alone(list.both_steps, i, other, of_second) : moved + i - kept;
        const u32 length = min(p.slot, width - j * p.slot);
        writer.put(place, start + j * p.slot, length << 24 | members);
      }
    }
    __syncwarp();
    both += both_here;
    first += totals >> 16;
    second += here - halves_begin;
  }
  if (!p.share) return;
  writer.pad(list.both + list.of_first + list.of_second, list.both_steps * p.per_step);
  auto pad_half = [&](int count, int steps, int other, int late) {
    if (count == steps * p.per_step) return;
    const int begin_of_padding = writer.alone(list.both_steps, count, other, late);
    writer.pad(begin_of_padding, begin_of_padding + steps * p.per_step - count);
  };
  pad_half(list.first, list.first_steps, list.second_steps, 0);
  pad_half(list.second, list.second_steps, list.first_steps, 1);
}

}  // namespace tessera

// The entries of the three kernels. One CTA a multiprocessor is named so that ptxas does not aim at
// more by spilling.
#define TESSERA_TILE_COUNTS(WARPS)                                       \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)            \
      tile_counts(const __grid_constant__ tessera::TilesParams params) { \
    tessera::tile_counts(params);                                        \
  }
#define TESSERA_TILE_SCAN(WARPS)                                       \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)          \
      tile_scan(const __grid_constant__ tessera::TilesParams params) { \
    tessera::tile_scan<WARPS>(params);                                 \
  }
#define TESSERA_TILE_FRAGMENTS(WARPS)                                       \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)               \
      tile_fragments(const __grid_constant__ tessera::TilesParams params) { \
    tessera::tile_fragments<WARPS>(params);                                 \
  }
