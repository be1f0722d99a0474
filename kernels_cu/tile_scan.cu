// Where each tile's list begins, and the tasks in launch order (common/tiles.cuh): what
// organization.organize makes with longest and split, in one CTA. Also the merge arrays and the
// counts.
//
// Shared memory: TileScanStorage.
#pragma once

#include "common/tiles.cuh"

namespace tessera {

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

__device__ __forceinline__ int pair_steps(const TilesParams& p, int pair) {
  return p.tile_steps[p.pairs == p.tiles ? pair : head_tile(p, pair).tile];
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
  p.counts[kErrors] = fits ? 0 : kCapacity;
  for (int i = kErrors + 1; i < kStamp; ++i) p.counts[i] = 0;
  p.counts[kStamp] = p.stamp;
}

}  // namespace tessera

// The one entry of a specialisation.
#define TESSERA_TILE_SCAN(WARPS)                                       \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)          \
      tile_scan(const __grid_constant__ tessera::TilesParams params) { \
    tessera::tile_scan<WARPS>(params);                                 \
  }
