// Where each tile's list begins, and the tasks in launch order (common/tiles.cuh): what
// organization.organize makes with longest and split, in one CTA. Also the merge arrays and the
// counts.
//
// One CTA can hide nothing: its time is that of a chain of reads, barriers and instructions met for
// the first time, which come from L2 as data does. So loops are not unrolled unless reads gain by
// it, a warp takes one part of an array however long that is, and no thread divides by a number
// that the host knows. A barrier ends each of:
//   1  the sums of each warp's tiles: fragments, steps; the longest of them
//      where there is a CTA for each pair: when all would end with the length that a warp tries
//   2  where the lists begin; the tasks of each warp's pairs by the bucket of their length
//   3  tasks of each warp's buckets; 4  where each bucket of each warp's pairs begins
//   5  the turns in order
//   6  the last round's numbers; 7  its parts
//   8  if any pair is cut: the sums of each warp's pairs; then the merge arrays
//
// Shared memory: TileScanStorage.
#pragma once

#include "common/tiles.cuh"

namespace tessera {

// As in organization/organize.py.
inline constexpr int kFewestParts = 2;  // of a turn of the last round
inline constexpr int kMostParts = 4;

// Lengths are compared by the 1/16-wide bucket that they are in: how many edges they reach.
inline constexpr int kBuckets = 256;
inline constexpr int kTabled = 2048;  // lengths below it are looked up
__host__ __device__ constexpr int next_edge(int edge) {
  return edge * 17 / 16 > edge ? edge * 17 / 16 : edge + 1;
}
struct alignas(16) BucketTable {
  u8 of[kTabled];
  int next_edge;  // the first edge past them
};
constexpr BucketTable make_buckets() {
  BucketTable table{};
  int edge = 1;
  int bucket = 0;
  for (int length = 0; length < kTabled; ++length) {
    for (; edge <= length; edge = next_edge(edge)) ++bucket;
    table.of[length] = static_cast<u8>(bucket);
  }
  table.next_edge = edge;
  return table;
}
inline constexpr BucketTable kTable = make_buckets();
__device__ constexpr BucketTable kBucketTable = kTable;

// Turns of the last round are fewer than the CTAs that run at a time.
inline constexpr int kMaxCapacity = 4096;
inline constexpr int kChoices = kMostParts - kFewestParts + 1;

template <int kWarps>
struct TileScanStorage {
  union {
    u32 bucket[kWarps][kBuckets];  // tasks of each warp's pairs; then the place of the next one
    Turn last[kMaxCapacity];
  };
  u8 bucket_of[kTabled];
  i64 sums[kWarps];
  i64 steps[kWarps];
  i32 longest[kWarps];
  i32 lengths[kWarps];  // of the longest part, that each warp tries; and when all would end
  i32 ends[kWarps];
  i32 tasks[kWarps];
  i32 cuts[kChoices][kWarps];  // turns of a warp to cut, for each number of parts
  // For each number of parts: turns to cut, the longest of those, the longest of the others.
  i32 cut_turns[kChoices];
  i32 longest_cut[kChoices];
  i32 longest_left[kChoices];
  i32 any_cut;
};

// A warp's part of an array, taken 128 numbers at a time, four a lane.
struct Part {
  i32 begin;
  i32 end;
};

template <int kWarps>
__device__ __forceinline__ Part part_of_warp(int count) {
  const int length = ceil_div(count, 128 * kWarps) * 128;
  const int begin = min(count, static_cast<int>(threadIdx.x >> 5) * length);
  return {begin, min(count, begin + length)};
}

// Four numbers of an array that begins at a multiple of 16 bytes; 0 past its part's end.
__device__ __forceinline__ int4 four(const i32* array, int index, int end) {
  if (index + 4 <= end) return *reinterpret_cast<const int4*>(array + index);
  int4 values = make_int4(0, 0, 0, 0);
  if (index < end) values.x = array[index];
  if (index + 1 < end) values.y = array[index + 1];
  if (index + 2 < end) values.z = array[index + 2];
  return values;
}

__device__ __forceinline__ i64 sum_of(int4 values) {
  return static_cast<i64>(values.x) + values.y + values.z + values.w;
}

// What the warps before the own one have, and all of them.
struct Sums {
  i64 before;
  i64 all;
};

template <int kWarps>
__device__ __forceinline__ Sums sums_of(const i64 (&sums)[kWarps]) {
  static_assert(kWarps == 32, "one lane for each warp's sum");
  const int lane = threadIdx.x & 31;
  const i64 sum = sums[lane];
  return {warp_total(lane < static_cast<int>(threadIdx.x >> 5) ? sum : 0), warp_total(sum)};
}

// Exclusive sums of a part's numbers go to store(index, sum, number), from `before` on.
template <typename Load, typename Store>
__device__ __forceinline__ void scan_part(Part part, i64 before, Load load, Store store) {
  const int lane = threadIdx.x & 31;
#pragma unroll 1
  for (int base = part.begin; base < part.end; base += 128) {
    const int index = base + 4 * lane;
    const int4 values = load(index);
    const i32 sum = values.x + values.y + values.z + values.w;
    // Most pairs are not cut, and then there is nothing to add up.
    const i32 upto = __any_sync(kAllLanes, sum != 0) ? warp_scan(sum) : 0;
    i64 next = before + upto - sum;
#pragma unroll 1
    for (int j = 0; j < 4 && index + j < part.end; ++j) {
      const i32 value = j == 0 ? values.x : j == 1 ? values.y : j == 2 ? values.z : values.w;
      store(index + j, next, value);
      next += value;
    }
    before += __shfl_sync(kAllLanes, upto, 31);
  }
}

__device__ __forceinline__ int pair_steps(const TilesParams& p, int pair) {
  return p.tile_steps[p.pairs == p.tiles ? pair : head_tile(p, pair).tile];
}

__device__ __forceinline__ int part_steps(int steps, int parts, int part) {
  return parts == 1 ? steps : part_begin(steps, parts, part + 1) - part_begin(steps, parts, part);
}

__device__ __forceinline__ int bucket_of(const u8 (&table)[kTabled], int steps) {
  int bucket = table[min(steps, kTabled - 1)];
  if (steps >= kTabled) {
#pragma unroll 1
    for (int edge = kTable.next_edge; edge <= steps && bucket < kBuckets - 1;) {
      ++bucket;
      edge = next_edge(edge);
    }
  }
  return bucket;
}

// In place of the parts of a pair: its tile has no rows, and it no task.
inline constexpr int kNoTask = -0x7fffffff - 1;

// A warp visits the tasks of pairs [begin, end) in order, 32 at a time, all lanes together:
// visit(on, turn, key). parts_or_key(pair) is the number of parts of a pair that is cut, or ~key,
// or kNoTask.
template <bool kRagged, typename PartsOrKey, typename Visit>
__device__ __forceinline__ void each_task(const TilesParams& p, const u8 (&table)[kTabled],
                                          int begin, int end, PartsOrKey parts_or_key,
                                          Visit visit) {
  const int lane = threadIdx.x & 31;
#pragma unroll 1
  for (int base = begin; base < end; base += 32) {
    const bool on = base + lane < end;
    const int value = on ? parts_or_key(base + lane) : ~0;
    const bool cut = __any_sync(kAllLanes, value > 0 || (kRagged && value == kNoTask));
    const int tasks = value > 0 ? value : on && !(kRagged && value == kNoTask);
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
#pragma unroll 1
        for (int step = 16; step > 0; step /= 2) {
          if (__shfl_sync(kAllLanes, upto, owner + step - 1) <= index) owner += step;
        }
        parts = __shfl_sync(kAllLanes, tasks, owner);
        part = index - (__shfl_sync(kAllLanes, upto, owner) - parts);
        key = ~__shfl_sync(kAllLanes, value, owner);
        if (parts > 1 && index < total) {
          key = bucket_of(table, part_steps(pair_steps(p, base + owner), parts, part));
        }
      }
      visit(index < total, Turn{base + owner, static_cast<u16>(part), static_cast<u16>(parts)},
            key);
    }
  }
}

// Which tiles are cut, and into parts of how many steps at most.
struct Cuts {
  int longest_part;
  int from;  // tiles of so many steps and more
};
inline constexpr Cuts kNoCuts{1, 0x7fffffff};

// The length of parts that ends soonest where there is a CTA for each pair; see _one_round in
// organization/organize.py. Each warp tries a length of its own.
template <int kWarps>
__device__ __forceinline__ Cuts one_round(const TilesParams& p, TileScanStorage<kWarps>& shared,
                                          int share, int longest, int pairs) {
  static_assert(kWarps == 32, "one lane for each warp's length");
  constexpr int kSecond = 3;  // an eighth, a quarter, a half of a length
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  const int worth = longest - 2 * p.part_steps;
  if (share > worth) return kNoCuts;
  int length = share;
#pragma unroll 1
  for (int i = 0; i < warp && length <= worth; ++i) length = next_edge(length);
  int end = kNoCuts.from;
  if (length <= worth) {
    int of_cut = 0;
    int cut = 0;
    int longest_whole = 0;
    int longer[kSecond]{};  // whole tiles that are
#pragma unroll 1
    for (int i = lane; i < p.tiles; i += 32) {
      const int steps = p.tile_steps[i];
      if (steps - length >= p.part_steps) {
        of_cut += ceil_div(steps, length);
        ++cut;
      } else {
        longest_whole = max(longest_whole, steps);
#pragma unroll
        for (int j = 0; j < kSecond; ++j) longer[j] += steps << (kSecond - j) > length;
      }
    }
    of_cut = __reduce_add_sync(kAllLanes, of_cut);
    cut = __reduce_add_sync(kAllLanes, cut);
    longest_whole = __reduce_max_sync(kAllLanes, longest_whole);
    const int heads = p.pairs / max(1, p.tiles);
    int second = 0;
    if (pairs + (of_cut - cut) * heads > p.capacity) {
      second = length;
#pragma unroll
      for (int j = kSecond - 1; j >= 0; --j) {
        const int turns = (of_cut + __reduce_add_sync(kAllLanes, longer[j])) * heads;
        if (turns <= p.capacity) second = length >> (kSecond - j);
      }
    }
    end = max(length, longest_whole) + second;
  }
  if (lane == 0) {
    shared.lengths[warp] = length;
    shared.ends[warp] = end;
  }
  __syncthreads();
  const int soonest = __reduce_min_sync(kAllLanes, shared.ends[lane]);
  if (soonest > worth) return kNoCuts;
  const u32 as_soon = __ballot_sync(kAllLanes, shared.ends[lane] == soonest);
  const int best = shared.lengths[__ffs(as_soon) - 1];
  return {best, best + p.part_steps};
}

// Writes the turns in launch order, and to pair_slots the parts of pairs that are cut; of others,
// what is not above 0. Returns the number of turns.
template <bool kRagged, int kWarps>
__device__ __forceinline__ int order_turns(const TilesParams& p, TileScanStorage<kWarps>& shared,
                                           Cuts cuts) {
  static_assert(kWarps == 32, "one lane for each warp's tasks");
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  const u32 lower_lanes = (1u << lane) - 1;
  // 2^w warps share a group of heads, or a warp takes a group, and another in the next round.
  const int ways_log2 = max(0, __clz(p.groups - 1) - 27);
  const int ways = 1 << ways_log2;
  const int segment = (((p.group_pairs + ways - 1) >> ways_log2) + 31) & -32;
  // Numbers that a thread adds up: of each way, in `columns` buckets, from the longest on.
  constexpr int kRead = 4;
  const int columns = max(1, kBuckets / 32 >> ways_log2);
  const int column = (threadIdx.x & (32 * ways - 1)) * columns;
  const int numbers = column < kBuckets ? columns * ways : 0;
  static_assert(kBuckets / 32 % kRead == 0, "no number is left over");
  u32(&bucket)[kBuckets] = shared.bucket[warp];
  auto tasks_of = [&](int number) -> u32& {
    return shared.bucket[(warp & -ways) + (number & (ways - 1))]
                        [kBuckets - 1 - column - (number >> ways_log2)];
  };
  int done = 0;
#pragma unroll 1
  for (int first_group = 0; first_group < p.groups; first_group += kWarps >> ways_log2) {
    const int group = first_group + (warp >> ways_log2);
    const bool works = group < p.groups;
    const int end_of_group = works ? min(p.pairs, (group + 1) * p.group_pairs) : 0;
    const int begin = works ? group * p.group_pairs + (warp & (ways - 1)) * segment : 0;
    const int end = min(begin + segment, end_of_group);

#pragma unroll 1
    for (int i = lane; i < kBuckets; i += 32) bucket[i] = 0;
    __syncwarp();
    // Counted first, then placed, by the same code: it is met for the first time only once.
#pragma unroll 1
    for (int placing = 0; placing < 2; ++placing) {
      each_task<kRagged>(
          p, shared.bucket_of, begin, end,
          [&](int pair) {
            const int steps = pair_steps(p, pair);
            if (kRagged && p.q_starts != nullptr &&
                p.tile_q[2 * head_tile(p, pair).tile + 1] == 0) {
              if (placing == 0) p.pair_slots[pair] = kNoTask;
              return kNoTask;
            }
            const bool cut = steps >= cuts.from;
            const int value =
                cut ? ceil_div(steps, cuts.longest_part) : ~bucket_of(shared.bucket_of, steps);
            if (placing == 0) {
              if (cut) shared.any_cut = 1;
              p.pair_slots[pair] = value;
            }
            return value;
          },
          [&](bool on, Turn turn, int key) {
            if (placing == 0) {
              if (on) atomicAdd(&bucket[key], 1u);
              return;
            }
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
              if (place < static_cast<u32>(p.task_capacity)) p.turns[place] = turn;
            }
            __syncwarp();
          });
      __syncthreads();
      if (placing != 0) break;

      // Longest first, and inside a bucket in the order of pairs.
      u32 total = 0;
#pragma unroll 1
      for (int i = 0; i < numbers; i += kRead) {
#pragma unroll
        for (int j = 0; j < kRead; ++j) total += tasks_of(i + j);
      }
      const u32 upto = warp_scan(total);
      if (lane == 31) shared.tasks[warp] = upto;
      __syncthreads();
      const u32 tasks = shared.tasks[lane];
      u32 next = done + __reduce_add_sync(kAllLanes, lane < warp ? tasks : 0) + upto - total;
      done += __reduce_add_sync(kAllLanes, tasks);
#pragma unroll 1
      for (int i = 0; i < numbers; i += kRead) {
        u32 count[kRead];
#pragma unroll
        for (int j = 0; j < kRead; ++j) count[j] = tasks_of(i + j);
#pragma unroll
        for (int j = 0; j < kRead; ++j) {
          tasks_of(i + j) = next;
          next += count[j];
        }
      }
      __syncthreads();
    }
  }
  return done;
}

// Cuts whole tiles of the last round in parts that come last; see _last_round in
// organization/organize.py. Returns the number of turns.
template <int kWarps>
__device__ __forceinline__ int cut_last_round(const TilesParams& p, TileScanStorage<kWarps>& shared,
                                              int turns) {
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  const int first = turns / p.by_capacity * p.capacity;
  const int rest = turns - first;
  const int last_group = (p.groups - 1) * p.group_pairs;
  auto may_cut = [&](Turn turn, int steps, int parts) {
    return turn.parts == 1 && turn.pair >= last_group && steps >= parts * p.part_steps;
  };
  // A warp takes neighbouring turns; for most capacities 32 of them, and most warps none.
  const int length = ceil_div(rest, 32 * kWarps) * 32;
  const int begin = min(rest, warp * length);
  const int end = min(rest, begin + length);

  if (begin < end) {
    int count[kChoices]{};
    int longest_cut[kChoices]{};
    int longest_left[kChoices]{};
#pragma unroll 1
    for (int i = begin + lane; i < end; i += 32) {
      const Turn turn = p.turns[first + i];
      shared.last[i] = turn;
      const int steps = part_steps(pair_steps(p, turn.pair), turn.parts, turn.part);
#pragma unroll
      for (int k = 0; k < kChoices; ++k) {
        const bool cut = may_cut(turn, steps, kFewestParts + k);
        count[k] += cut;
        longest_cut[k] = max(longest_cut[k], cut ? steps : 0);
        longest_left[k] = max(longest_left[k], cut ? 0 : steps);
      }
    }
    __syncwarp();
    // A lane for each number.
    int mine = 0;
#pragma unroll
    for (int k = 0; k < kChoices; ++k) {
      const int cuts = __reduce_add_sync(kAllLanes, count[k]);
      const int cut = __reduce_max_sync(kAllLanes, longest_cut[k]);
      const int left = __reduce_max_sync(kAllLanes, longest_left[k]);
      mine = lane == k ? cuts : lane == kChoices + k ? cut : lane == 2 * kChoices + k ? left : mine;
    }
    if (lane < kChoices) {
      shared.cuts[lane][warp] = mine;
      atomicAdd(&shared.cut_turns[lane], mine);
    } else if (lane < 2 * kChoices) {
      atomicMax(&shared.longest_cut[lane - kChoices], mine);
    } else if (lane < 3 * kChoices) {
      atomicMax(&shared.longest_left[lane - 2 * kChoices], mine);
    }
  }
  __syncthreads();

  const int longest = max(shared.longest_cut[0], shared.longest_left[0]);
  int time = longest;
  int parts = 1;
  int cuts = 0;
#pragma unroll
  for (int k = 0; k < kChoices; ++k) {
    const int count = kFewestParts + k;
    // Turns are fewer than kMostParts for each CTA.
    const int all = rest + (count - 1) * shared.cut_turns[k];
    int rounds = 0;
#pragma unroll
    for (int full = 0; full < kMostParts; ++full) rounds += all > full * p.capacity;
    const int one_part = ceil_div(shared.longest_cut[k], count);
    const int end_of_round = max(one_part, shared.longest_left[k]) + (rounds - 1) * one_part;
    if (end_of_round < time && 10 * (longest - end_of_round) >= longest) {
      time = end_of_round;
      parts = count;
      cuts = shared.cut_turns[k];
    }
  }
  const int total = turns + (parts - 1) * cuts;
  // The others move up, and the parts come behind them, in order.
  if (parts > 1 && total <= p.task_capacity) {
    if (begin < end) {
      const u32 lower_lanes = (1u << lane) - 1;
      const int cuts_before =
          __reduce_add_sync(kAllLanes, lane < warp ? shared.cuts[parts - kFewestParts][lane] : 0);
      int stays = first + begin - cuts_before;
      int goes = turns - cuts + cuts_before * parts;
#pragma unroll 1
      for (int base = begin; base < end; base += 32) {
        const bool on = base + lane < end;
        const Turn turn = on ? shared.last[base + lane] : Turn{};
        const bool cut = on && may_cut(turn, pair_steps(p, turn.pair), parts);
        const u32 cut_lanes = __ballot_sync(kAllLanes, cut);
        const u32 other_lanes = __ballot_sync(kAllLanes, on && !cut);
        if (cut) {
          const int place = goes + __popc(cut_lanes & lower_lanes) * parts;
#pragma unroll 1
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
    }
    if (threadIdx.x == 0) shared.any_cut = 1;
  }
  __syncthreads();
  return total;
}

// Slots of the pairs that are cut, and the merge arrays. Slots follow the pairs, not the launch
// order: merging reads them from first to last. Returns the merged tiles in the upper half word,
// their parts in the lower.
template <int kWarps>
__device__ __forceinline__ i64 place_slots(const TilesParams& p, TileScanStorage<kWarps>& shared) {
  const int lane = threadIdx.x & 31;
  const Part part = part_of_warp<kWarps>(p.pairs);
  auto counted = [](i32 parts) { return parts > 0 ? parts + 0x10000 : 0; };
  auto load = [&](int index) {
    const int4 parts = four(p.pair_slots, index, part.end);
    return make_int4(counted(parts.x), counted(parts.y), counted(parts.z), counted(parts.w));
  };
  i64 sum = 0;
#pragma unroll 1
  for (int i = part.begin + 4 * lane; i < part.end; i += 128) sum += sum_of(load(i));
  sum = warp_total(sum);
  if (lane == 0) shared.sums[threadIdx.x >> 5] = sum;
  __syncthreads();
  const Sums sums = sums_of(shared.sums);
  scan_part(part, sums.before, load, [&](int pair, i64 before, i32 parts) {
    if (parts == 0) return;
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
  return sums.all;
}

template <bool kRagged, int kWarps>
__device__ __forceinline__ void tile_scan(const TilesParams& p) {
  extern __shared__ __align__(1024) u8 dynamic_smem[];
  TileScanStorage<kWarps>& shared = *reinterpret_cast<TileScanStorage<kWarps>*>(dynamic_smem);
  const int thread = threadIdx.x;
  const int lane = thread & 31;
  const Part part = part_of_warp<kWarps>(p.tiles);
  if (thread < kTabled / 16) {
    reinterpret_cast<uint4*>(shared.bucket_of)[thread] =
        reinterpret_cast<const uint4*>(kBucketTable.of)[thread];
  }
  if (thread < kChoices) {
    shared.cut_turns[thread] = shared.longest_cut[thread] = shared.longest_left[thread] = 0;
  }
  if (thread == 0) shared.any_cut = 0;

  i64 frags = 0;
  i64 steps = 0;
  int longest = 0;
#pragma unroll 1
  for (int i = part.begin + 4 * lane; i < part.end; i += 128) {
    frags += sum_of(four(p.tile_frags, i, part.end));
    const int4 of = four(p.tile_steps, i, part.end);
    steps += sum_of(of);
    longest = max(longest, max(max(of.x, of.y), max(of.z, of.w)));
  }
  frags = warp_total(frags);
  steps = warp_total(steps);
  longest = __reduce_max_sync(kAllLanes, longest);
  if (lane == 0) {
    shared.sums[thread >> 5] = frags;
    shared.steps[thread >> 5] = steps;
    shared.longest[thread >> 5] = longest;
  }
  if (kRagged && p.q_starts != nullptr) {
    int with_rows = 0;
#pragma unroll 1
    for (int i = part.begin + lane; i < part.end; i += 32) with_rows += p.tile_q[2 * i + 1] > 0;
    with_rows = __reduce_add_sync(kAllLanes, with_rows);
    if (lane == 0) shared.tasks[thread >> 5] = with_rows;
  }
  __syncthreads();
  const Sums sums = sums_of(shared.sums);
  int pairs = p.pairs;  // that have a task
  if (kRagged && p.q_starts != nullptr) {
    pairs = __reduce_add_sync(kAllLanes, shared.tasks[lane]) * (p.pairs / max(1, p.tiles));
  }
  scan_part(
      part, sums.before, [&](int index) { return four(p.tile_frags, index, part.end); },
      [&](int tile, i64 before, i32) { p.frag_offsets[tile] = before; });
  // Heads that share a mask head have its tiles each.
  i64 all_steps = warp_total(shared.steps[lane]);
  if (p.pairs != p.tiles) all_steps *= p.pairs / max(1, p.tiles);

  bool fits = sums.all <= p.frag_capacity;
  int turns = 0;
  i64 cut = 0;
  if (fits) {
    const u64 rounded = static_cast<u64>(all_steps) + static_cast<u32>(p.capacity) - 1;
    const u64 fair = rounded >> 31 == 0 ? static_cast<int>(rounded) / p.by_capacity
                                        : rounded / static_cast<u32>(p.capacity);
    // No tile is as long as 2^29 steps, and three times that is still a number of 32 bits.
    const u64 most = u64{1} << 29;
    const int share = max(p.part_steps, static_cast<int>(fair < most ? fair : most));
    // Tiles up to half above a share stay whole, and those up to two parts above it.
    Cuts cuts{share, max(3 * share / 2 + 1, share + 2 * p.part_steps)};
    if (pairs <= p.capacity) {
      const int of_all = __reduce_max_sync(kAllLanes, shared.longest[lane]);
      const Cuts found = one_round<kWarps>(p, shared, share, of_all, pairs);
      if (p.ctas_per_sm == 1 || found.from != kNoCuts.from) cuts = found;
    }
    turns = order_turns<kRagged>(p, shared, cuts);
    fits = turns <= p.task_capacity;
    if (fits && pairs > p.capacity) {
      turns = cut_last_round<kWarps>(p, shared, turns);
      fits = turns <= p.task_capacity;
    }
    if (fits && shared.any_cut) {
      cut = place_slots<kWarps>(p, shared);
      fits = cut >> 16 <= p.merge_capacity;
    }
  }
  if (thread != 0) return;
  p.frag_offsets[p.tiles] = sums.all;
  const i64 merges = fits ? cut >> 16 : 0;
  const i64 slots = fits ? cut & 0xffff : 0;
  p.merge_offsets[merges] = static_cast<i32>(slots);
  p.counts[kFragments] = sums.all;
  p.counts[kTasks] = fits ? turns : 0;
  p.counts[kMerges] = merges;
  p.counts[kSlots] = slots;
  p.counts[kErrors] = fits ? 0 : kCapacity;
#pragma unroll
  for (int i = kErrors + 1; i < kStamp; ++i) p.counts[i] = 0;
  p.counts[kStamp] = p.stamp;
}

}  // namespace tessera

// The one entry of a specialisation.
#define TESSERA_TILE_SCAN(WARPS, RAGGED)                               \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)          \
      tile_scan(const __grid_constant__ tessera::TilesParams params) { \
    tessera::tile_scan<RAGGED, WARPS>(params);                         \
  }
