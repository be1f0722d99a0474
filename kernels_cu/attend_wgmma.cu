// Block-sparse attention forward with wgmma and the tensor copy engine, for Hopper (sm_90a).
//
//   O[r] = sum_c P[r, c] V[c] / sum_c P[r, c],   P[r, c] = exp(scale * Q[r] . K[c])
//   over the key rows c that the tile's fragments list for row r; LSE[r] = ln sum_c P[r, c].
//
// A CTA takes tasks in turn: query rows, neighbours or units of 16 from anywhere, and KV steps
// filled from fragments of 8 to 64 rows that lie anywhere.
//
// Roles: in warpgroup 0, warp 0 copies K, warp 1 V and warp 2 Q; each of the others multiplies 64
// query rows. A warpgroup that has no row in a step takes no notice of it: each set of warpgroups
// has barriers of its own. In the others the product of a step's K is issued, then that of the step
// before with V, which runs under the softmax; the warpgroups take turns at it. Where a task ends,
// its last product with V runs beside the next task's first with K. Registers hold O, one S, one P.
//
// Softmax: P is 2^(score - bound), where the bound of a row is the largest score of the first step
// that it has a part in. No maximum is looked for after that: P may exceed 1, and the sum of a
// step's P tells where it is so large that the bound has to move. Where P is not even a number, the
// CTA takes all its tasks a second time, and looks for the largest score of each step.
//
// Gather: the rows of some fragments lie anywhere. Two warps copy K then and two V, one of which
// copies Q too; they copy such rows 16 bytes a lane, and their lanes arrive at the stage's barrier
// when their copies are complete. These are writes of the generic proxy, which wgmma reads in its
// own: consumers fence between them. On tiles of 128 columns two warpgroups copy, four warps K and
// four V, through three stages, for steps with half of the products to the same bytes.
//
// Twins: the two CTAs of a cluster hold tasks with equal lists. Each copies half of every step's
// fragments, into the shared memory of both.
//
// Shared memory: Q [warpgroup][64-column slab][64 rows][128 B]; two or three stages each of K and V
// [8-row group][slab][8 rows][128 B], so a fragment of any multiple of 8 rows is one run of bytes
// and descriptors have fixed strides. All in the 128-byte swizzle. At head dim 128: 32 + 4 * 48 KB.
#pragma once

#include "common/ptx.cuh"
#include "common/ptx_hopper.cuh"
#include "common/task_times.cuh"
#include "common/types.cuh"

namespace tessera {

template <typename T_, int kHeadDim_, int kTileQ_, int kTileKV_, int kStages_, bool kTwins_,
          bool kBits_, bool kGather_>
struct WgmmaConfig {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kTileQ = kTileQ_;
  static constexpr int kTileKV = kTileKV_;
  static constexpr bool kTwins = kTwins_;
  static constexpr bool kBits = kBits_;                        // fragments may have token bits
  static constexpr bool kGather = kGather_;                    // rows of fragments may lie anywhere
  static constexpr int kStages = kStages_;                     // of K, and of V
  static constexpr int kWarpgroups = kTileQ / 64;              // that multiply
  static constexpr bool kHalves = kWarpgroups == 2 && !kBits;  // tiles may be of halves
  static constexpr u32 kAll = (1u << kWarpgroups) - 1u;
  static constexpr int kSets = kAll;                                  // sets of warpgroups
  static constexpr int kCopiers = kGather && kTileKV == 128 ? 2 : 1;  // warpgroups that copy
  static constexpr int kThreads = 128 * (kCopiers + kWarpgroups);
  static constexpr int kSlabs = kHeadDim / 64;
  static constexpr int kQBytes = 64 * kHeadDim * 2;  // of one warpgroup
  static constexpr int kTileBytes = kTileKV * kHeadDim * 2;
  static constexpr int kGroupBytes = 8 * kHeadDim * 2;
  static constexpr int kOut = kHeadDim / 2;    // O registers of a thread
  static constexpr int kScores = kTileKV / 2;  // S registers of a thread
  static constexpr int kGroups = kTileKV / 8;
  // Sums of a row's P in one step and one thread stay below: 16-bit floats hold such a P, and
  // rounding is as good as near 1.
  static constexpr float kHigh = 4096.0f;
  static_assert(kHeadDim == 64 || kHeadDim == 128, "one or two slabs of 64 columns");
  static_assert(kTileKV == 128 || kTileKV == 192, "the shapes of wgmma_qk");
  static_assert(kTileQ == 128 || kTileQ == 192, "two or three warpgroups of 64 rows");
  static_assert(!kTwins || kStages == 2, "steps of twins begin at even numbers");
  static_assert(!kGather || (kTileQ == 128 && !kTwins && !kBits),
                "gathered fragments use the bit of a group that tiles of 128 rows lack");
  // Registers of a thread: the producer's and a consumer's.
  static constexpr int kProducerRegisters = kWarpgroups == 3 ? 32 : kCopiers == 2 ? 48 : 24;
  static constexpr int kConsumerRegisters = kWarpgroups == 3 ? 160 : kCopiers == 2 ? 208 : 240;
  // setmaxnreg waits for ever where a CTA asks for more than it was launched with.
  static_assert(kCopiers * kProducerRegisters + kWarpgroups * kConsumerRegisters <=
                    (kCopiers + kWarpgroups) * (65536 / kThreads / 8 * 8),
                "the registers of all warpgroups are those of the launch");
  // Warps that gather K, and as many that gather V.
  static constexpr int kGatherers = 2 * kCopiers;
  // That a stage's barrier waits for: of warps that gather each lane, and in gather_kv one more
  // for the bytes of TMA.
  static constexpr int kArrivals = !kGather ? 1 : kGatherers * (kCopiers == 2 ? 32 : 33);
  static constexpr int kWalkers = kThreads - (kGather ? 0 : 32);  // all but an idle warp
};

template <typename C>
struct WgmmaStorage {
  alignas(1024) u8 q[C::kWarpgroups * C::kQBytes];
  alignas(1024) u8 k[C::kStages * C::kTileBytes];
  alignas(1024) u8 v[C::kStages * C::kTileBytes];
  alignas(8) u64 q_full[C::kWarpgroups];
  u64 q_empty[C::kWarpgroups];
  // A step's barrier is that of its stage and of the set of warpgroups that have a part in it, so
  // that each of these waits for all its phases.
  u64 k_full[C::kSets][C::kStages];
  u64 v_full[C::kSets][C::kStages];
  u64 k_empty[C::kWarpgroups][C::kStages];
  u64 v_empty[C::kWarpgroups][C::kStages];
  u64 k_ready[C::kStages];  // the stage is free in the other CTA, too
  u64 v_ready[C::kStages];
  u32 again;  // some P was no number
};

// Bit w: whether warpgroup w has a part in the step of which each lane holds a fragment's word.
template <typename C>
__device__ __forceinline__ u32 parts_of_step(bool exists, u32 info, u32 existing) {
  u32 parts = 0;
#pragma unroll
  for (int w = 0; w < C::kWarpgroups; ++w) {
    const u32 members = info & existing & 0xffu << (w * 8);
    parts |= __any_sync(~0u, exists && members != 0u) ? 1u << w : 0u;
  }
  return parts;
}

// Membership bits of the rows of a task's tile that exist, from its word of rows.
template <typename C>
__device__ __forceinline__ u32 existing_groups(i32 word) {
  const int rows = rows_of(word);
  if (C::kHalves && first_half(word) >= 0) {
    const int first = first_half(word);
    return ((1u << ((first + 7) / 8)) - 1u) | ((1u << ((rows - first + 7) / 8)) - 1u) << 8;
  }
  return rows == C::kTileQ ? ~0u : (1u << ((rows + 7) / 8)) - 1u;
}

// Rows that a tile of halves lacks in front of its second one, which is the second warpgroup's.
template <typename C>
__device__ __forceinline__ int lacking_rows(const Task& task) {
  return C::kHalves && first_half(task.rows) >= 0 ? 64 - first_half(task.rows) : 0;
}

// The tasks of this CTA, once or twice. All warps of it but an idle one go through them alike.
template <typename C>
struct TaskWalk {
  static constexpr u32 kSecond = 1u << 31;

  const WgmmaParams& p;
  WgmmaStorage<C>& smem;
  const int count;
  int index;  // of the task, -1 after the last
  u32 word;   // kSecond, once the tasks are taken again; the other bits are whoever walks'

  __device__ __forceinline__ TaskWalk(const WgmmaParams& params, WgmmaStorage<C>& storage)
      : p(params),
        smem(storage),
        count(params.counts == nullptr ? params.task_count
                                       : static_cast<int>(params.counts[kTasks])),
        index(blockIdx.x),
        word(0) {
    if (index >= count) index = -1;
  }

  __device__ __forceinline__ const Task& task() const { return p.tasks[index]; }
  __device__ __forceinline__ bool second() const { return (word & kSecond) != 0u; }
  __device__ __forceinline__ bool more() const {
    return index + static_cast<int>(gridDim.x) < count;
  }
  __device__ __forceinline__ void next() {
    if (more()) {
      index += gridDim.x;
      return;
    }
    index = -1;
    if (second()) return;
    named_barrier_sync(8, C::kWalkers);
    if (!__any_sync(~0u, *static_cast<volatile u32*>(&smem.again) != 0u)) return;
    word |= kSecond;
    index = blockIdx.x;
  }

  // Whether the other CTA of the cluster has the same list at this time. It need not take its tasks
  // again when this one does.
  __device__ __forceinline__ bool twin() const {
    return C::kTwins && (task().flags & kTwin) != 0 && !second();
  }
};

// The step's number from the start on, of which the stages follow. Those of twins begin alike.
struct StepCount {
  u32 value = 0;
  bool agreed = false;  // with the other CTA's

  __device__ __forceinline__ void begin(bool twin) {
    if (twin && !agreed) value += value & 1u;
    agreed = twin;
  }
};

// Has Q of a task copied: 16 rows a box, as the rows of a tile may lie apart.
template <typename C>
__device__ __forceinline__ void load_q(const WgmmaParams& p, WgmmaStorage<C>& smem,
                                       const Task& task, u32 phase, int lane) {
  const int lacking = lacking_rows<C>(task);
  for (int w = 0; w < C::kWarpgroups; ++w) {
    const int unit = w * 4 + lane % 4;
    const int row = task.units < 0 ? task.first_row + unit * 16 - (w > 0 ? lacking : 0)
                                   : __ldg(p.units + task.units + unit);
    mbarrier_wait(smem_address(&smem.q_empty[w]), phase);
    const u32 barrier = smem_address(&smem.q_full[w]);
    if (lane == 0) mbarrier_arrive_expect(barrier, C::kQBytes);
    __syncwarp();
    if (lane < 4 * C::kSlabs) {
      // Rows that do not exist are zeros from beyond the last one.
      tma_load_4d(smem_address(smem.q) + w * C::kQBytes + lane / 4 * 8192 + lane % 4 * 2048, &p.q,
                  barrier, lane / 4 * 64, row < 0 ? p.sq : row, task.head % p.q_heads,
                  task.head / p.q_heads);
    }
    __syncwarp();
  }
}

// The warp that copies Q.
template <typename C>
__device__ __forceinline__ void copy_q(const WgmmaParams& p, WgmmaStorage<C>& smem) {
  const int lane = threadIdx.x & 31;
  u32 phase = 1;
  for (TaskWalk<C> walk(p, smem); walk.index >= 0; walk.next()) {
    const Task& task = walk.task();
    load_q<C>(p, smem, task, phase, lane);
    phase ^= 1;
    // The other warpgroups read these words when they begin with the task: let them be near then.
    const int per_step = C::kTileKV >> p.slot_log2;
    const int index = (task.flags & kReverse ? task.end - 1 : task.begin) * per_step + lane;
    if (lane < per_step && index < task.frag_count)
      keep(__ldg(&p.frags[task.frag_begin + index].info));
  }
}

// The warp that copies K, or V: a lane a fragment, through the map of whole fragments where it can.
template <typename C>
__device__ __forceinline__ void copy_kv(const WgmmaParams& p, WgmmaStorage<C>& smem, u8* tiles,
                                        u64 (*full)[C::kStages], u64 (*empty)[C::kStages],
                                        u64* ready, const TensorMap* rows, const TensorMap* whole) {
  const int lane = threadIdx.x & 31;
  const int slot = 1 << p.slot_log2;
  const int fragments = C::kTileKV >> p.slot_log2;
  const u32 fragment_bytes = slot * C::kHeadDim * 2;
  StepCount n;
  u32 held = 0;    // bit (stage, warpgroup): the warpgroup has a part in the stage's last step
  u32 phases = 0;  // of its release; above them, of the other CTA's stages

  for (TaskWalk<C> walk(p, smem); walk.index >= 0; walk.next()) {
    const Task task = walk.task();
    const int batch = task.head / p.q_heads;
    const int head = task.head % p.q_heads / p.q_per_kv;
    const int steps = task.end - task.begin;
    const u32 existing = existing_groups<C>(task.rows);
    const bool twin = walk.twin();
    n.begin(twin);

    auto fetch = [&](int i) {
      const int step = task.flags & kReverse ? task.end - 1 - i : task.begin + i;
      const int index = step * fragments + lane;
      Fragment f{0, 0u};
      if (i < steps && lane < fragments && index < task.frag_count) {
        const u64 raw = __ldg(reinterpret_cast<const u64*>(p.frags + task.frag_begin + index));
        f.start = static_cast<i32>(raw);
        f.info = static_cast<u32>(raw >> 32);
      }
      return f;
    };

    Fragment f = fetch(0);
    for (int i = 0; i < steps; ++i, ++n.value) {
      const u32 stage = n.value % C::kStages;
      const int length = f.info >> 24;
      const bool loaded = length > 0 && (f.info & 0xffffffu) != 0;
      const u32 parts = parts_of_step<C>(loaded, f.info, existing);
      const u32 bytes = __popc(__ballot_sync(~0u, loaded)) * fragment_bytes;
      if (parts != 0u) {
#pragma unroll
        for (int w = 0; w < C::kWarpgroups; ++w) {
          const u32 of = stage * C::kWarpgroups + w;
          if (held >> of & 1u) {
            mbarrier_wait(smem_address(&empty[w][stage]), phases >> of & 1u);
            phases ^= 1u << of;
          }
        }
        held = (held & ~(C::kAll << (stage * C::kWarpgroups))) | parts << (stage * C::kWarpgroups);
        const u32 barrier = smem_address(&full[parts - 1][stage]);
        if (lane == 0) mbarrier_arrive_expect(barrier, bytes);
        __syncwarp();
        const u32 target = smem_address(tiles) + stage * C::kTileBytes + lane * fragment_bytes;
        // What a short fragment loads past its end is masked.
        const bool is_whole = f.start + slot <= p.whole_rows;
        const int kv_head = batch * (p.q_heads / p.q_per_kv) + head;
        if (C::kTwins && twin) {
          const u32 other = smem_address(&ready[stage]);
          if (lane == 0) mbarrier_arrive_remote(other, cluster_rank() ^ 1u);
          mbarrier_wait_cluster(other, phases >> (16 + stage) & 1u);
          phases ^= 0x10000u << stage;
          if (loaded && ((lane + i) & 1u) == cluster_rank()) {
            if (is_whole) {
              tma_multicast_5d(target, whole, barrier, 3, f.start & 7, f.start >> 3, kv_head);
            } else {
              for (int g = 0; g < slot / 8; ++g)
                for (int slab = 0; slab < C::kSlabs; ++slab)
                  tma_multicast_4d(target + (g * C::kSlabs + slab) * 1024, rows, barrier, 3,
                                   slab * 64, f.start + g * 8, head, batch);
            }
          }
        } else if (loaded) {
          if (is_whole) {
            tma_load_5d(target, whole, barrier, f.start & 7, f.start >> 3, kv_head);
          } else {
            for (int g = 0; g < slot / 8; ++g)
              for (int slab = 0; slab < C::kSlabs; ++slab)
                tma_load_4d(target + (g * C::kSlabs + slab) * 1024, rows, barrier, slab * 64,
                            f.start + g * 8, head, batch);
          }
        }
        __syncwarp();
      }
      f = fetch(i + 1);
    }
  }
}

// The other producers, where rows may lie anywhere: two warps copy K and two V, each every other
// group of 8 rows and every other whole fragment. Rows are looked up a step ahead, three numbers a
// lane. The second warp of V also copies Q.
//
// Eight lanes copy 128 bytes of a row at a time, in chunks of 16. A register is not free before the
// copy that reads it has gone its way, some 100 cycles later, and there are 24: so the addresses of
// four rows are made before any is copied, and those in shared memory are two and constants.
template <typename C, bool kOfV>
__device__ __forceinline__ void gather_kv(const WgmmaParams& p, WgmmaStorage<C>& smem, int half,
                                          u8* tiles, u64 (*full)[C::kStages],
                                          u64 (*empty)[C::kStages], const TensorMap* rows,
                                          const TensorMap* whole, const u16* source,
                                          const Strides& stride) {
  constexpr int kLooks = C::kTileKV / 64;
  constexpr int kAtOnce = 4;  // rows of a lane
  constexpr u32 kQPhase = 1u << 30;
  constexpr i32 kWhole = -1;  // of a fragment that is not gathered
  const int lane = threadIdx.x & 31;
  const int slot = 1 << p.slot_log2;
  const int fragments = C::kTileKV >> p.slot_log2;
  const u32 fragment_bytes = slot * C::kHeadDim * 2;
  u32 n = 0;       // number of the step
  u32 phases = 0;  // of releases, by (stage, warpgroup)
  u32 ready = 0;   // the task of the fragments and rows at hand
  int index = 0;
  Fragment f{0, 0u};
  i32 keys[kLooks];

  // Takes up a step's fragments, a lane each.
  auto fetch = [&](const Task& task) {
    f = {0, 0u};
    if (lane < fragments && index < task.frag_count) {
      const u64 raw = __ldg(reinterpret_cast<const u64*>(p.frags + task.frag_begin + index));
      f.start = static_cast<i32>(raw);
      f.info = static_cast<u32>(raw >> 32);
    }
  };
  auto first_index = [&](const Task& task) {
    return (task.flags & kReverse ? task.end - 1 : task.begin) * fragments + lane;
  };
  // Lane l looks up row l % 8 of the warp's group 4 j + l / 8. Behind a fragment's end any row
  // does.
  auto look_up = [&](int j) {
    const int lane = pinned(threadIdx.x & 31);
    const int column = (8 * j + lane / 8 * 2 + half) * 8;
    const int start = __shfl_sync(~0u, f.start, column >> p.slot_log2);
    const u32 info = __shfl_sync(~0u, f.info, column >> p.slot_log2);
    const int row = (column & (slot - 1)) + (lane & 7);
    const int length = static_cast<int>(info >> 24);
    keys[j] = length == 0 || (info & kGathered) == 0u ? kWhole : 0;
    if (row < length && keys[j] == 0) keys[j] = __ldg(p.rows + start + row);
    __syncwarp();
  };

  TaskWalk<C> walk(p, smem);
  u32& held = walk.word;  // bit (stage, warpgroup): it has a part in the stage's last step; kQPhase
  for (; walk.index >= 0; walk.next()) {
    const Task& task = walk.task();  // read again where it is used: registers are scarce
    const u32 existing = existing_groups<C>(task.rows);
    if (kOfV && half == 1) {
      held ^= kQPhase;
      load_q<C>(p, smem, task, held / kQPhase & 1u, pinned(lane));
    }
    int left = __shfl_sync(~0u, task.end - task.begin, 0);  // uniform, to ptxas as well
    if (left == 0) ready = 0;
    if (__any_sync(~0u, left > 0 && ready == 0)) {
      index = first_index(task);
      fetch(task);
#pragma unroll
      for (int j = 0; j < kLooks; ++j) look_up(j);
    }
#pragma unroll 1
    for (; left > 0; --left, ++n) {
      const u32 stage = n % C::kStages;
      const bool loaded = f.info >> 24 != 0u && (f.info & 0xffffffu) != 0u;
      const u32 parts = parts_of_step<C>(loaded, f.info, existing);
      const u32 barrier = smem_address(&full[parts - 1][stage]);
      if (parts != 0u) {
#pragma unroll
        for (int w = 0; w < C::kWarpgroups; ++w) {
          const u32 of = stage * C::kWarpgroups + w;
          if (held >> of & 1u) {
            mbarrier_wait(smem_address(&empty[w][stage]), phases >> of & 1u);
            phases ^= 1u << of;
          }
        }
        held = (held & ~(C::kAll << (stage * C::kWarpgroups))) | parts << (stage * C::kWarpgroups);
        const bool own_whole = loaded && (f.info & kGathered) == 0u && (lane & 1) == half;
        const u32 bytes = __popc(__ballot_sync(~0u, own_whole)) * fragment_bytes;
        if (lane == 0) mbarrier_arrive_expect(barrier, bytes);
        __syncwarp();
        if (own_whole) {
          const u32 target =
              smem_address(tiles) + stage * C::kTileBytes + pinned(lane) * fragment_bytes;
          const int batch = task.head / p.q_heads;
          const int head = task.head % p.q_heads / p.q_per_kv;
          if (f.start + slot <= p.whole_rows) {
            tma_load_5d(target, whole, barrier, f.start & 7, f.start >> 3,
                        batch * (p.q_heads / p.q_per_kv) + head);
          } else {
#pragma unroll 1
            for (int part = 0; part < slot / 8 * C::kSlabs; ++part)
              tma_load_4d(target + part * 1024, rows, barrier, part % C::kSlabs * 64,
                          f.start + part / C::kSlabs * 8, head, batch);
          }
        }
        __syncwarp();
      }
      // The fragments of the step to come.
      ready = 1;
      if (left > 1) {
        index += task.flags & kReverse ? -fragments : fragments;
        fetch(task);
      } else if (walk.more()) {
        const Task& next = p.tasks[walk.index + gridDim.x];
        index = first_index(next);
        fetch(next);
      } else {
        ready = 0;
      }
      const int at_once = pinned(threadIdx.x & 31);  // not worked out ahead
      const int own = at_once / 8;                   // of four rows
      const int chunk = at_once % 8;
      const u64 of_head = reinterpret_cast<u64>(source + task.head / p.q_heads * stride.batch +
                                                task.head % p.q_heads / p.q_per_kv * stride.head);
      const u32 row_bytes = static_cast<u32>(stride.row) * 2u;
      const u32 upper = smem_address(tiles) + stage * C::kTileBytes + half * C::kGroupBytes +
                        own * 128 + ((chunk ^ own) << 4);
      const u32 lower = (upper ^ 64u) + 512;  // four rows further down
#pragma unroll
      for (int j = 0; j < kLooks; ++j) {
        const u32 gathered = parts != 0u ? __ballot_sync(~0u, keys[j] != kWhole) : 0u;
        if (gathered == ~0u && p.head_dim == C::kHeadDim) {
#pragma unroll
          for (int first = 0; first < 8; first += kAtOnce) {
            u32 row[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
              row[i] = __shfl_sync(~0u, keys[j], (first + i) * 4 + own) * row_bytes + chunk * 16;
#pragma unroll
            for (int slab = 0; slab < C::kSlabs; ++slab)
#pragma unroll
              for (int i = 0; i < kAtOnce; ++i)
                cp_async16((i % 2 == 0 ? upper : lower) + slab * 1024 +
                               (8 * j + first + i / 2 * 2) * C::kGroupBytes,
                           of_head + row[i] + slab * 128, true);
          }
        } else {
#pragma unroll 1
          for (int i = 0; i < 8; ++i) {
            if ((gathered >> (4 * i) & 1u) == 0u) continue;
            const u32 row = __shfl_sync(~0u, keys[j], i * 4 + own) * row_bytes + chunk * 16;
#pragma unroll
            for (int slab = 0; slab < C::kSlabs; ++slab)
              cp_async16(
                  (i % 2 == 0 ? upper : lower) + slab * 1024 + (8 * j + i / 2 * 2) * C::kGroupBytes,
                  of_head + row + slab * 128, slab * 64 + chunk * 8 < p.head_dim);
          }
        }
        look_up(j);
      }
      if (parts != 0u) cp_async_arrive(barrier);
    }
  }
}

// Reads the fragments of one step after the other of all the CTA's tasks, a lane each.
template <typename C>
struct FragmentsAhead {
  const WgmmaParams& p;
  const int count;  // of tasks
  int task;
  int left;        // steps of it
  int index;       // of the lane's fragment in its list
  int limit;       // the list's end, 0 for lanes without a fragment
  int index_step;  // from one step to the next
  const u64* list;

  __device__ __forceinline__ FragmentsAhead(const WgmmaParams& params, int tasks)
      : p(params), count(tasks) {
    restart();
  }

  // Before the first task.
  __device__ __forceinline__ void restart() {
    task = static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x);
    left = 0;
  }

  // The next step's, start and info; nothing behind the last one.
  __device__ __forceinline__ u64 next() {
    constexpr int kForEver = 1 << 30;
    while (left == 0) {
      task += gridDim.x;
      if (task >= count) {
        left = kForEver;
        index = index_step = limit = 0;
        break;
      }
      const Task& at = p.tasks[task];
      const int lane = threadIdx.x & 31;
      const bool back = (at.flags & kReverse) != 0;
      index_step = C::kTileKV >> p.slot_log2;
      limit = lane < index_step ? at.frag_count : 0;
      list = reinterpret_cast<const u64*>(p.frags + at.frag_begin);
      index = (back ? at.end - 1 : at.begin) * index_step + lane;
      if (back) index_step = -index_step;
      left = __shfl_sync(~0u, at.end - at.begin, 0);  // uniform, to ptxas as well
    }
    const u64 raw = index < limit ? __ldg(list + index) : 0ull;
    index += index_step;
    --left;
    return raw;
  }
};

// The same on tiles of 128 columns, by twice as many warps, each of which copies 32 neighbouring
// rows of every step. Their time is short here, not their registers: what depends on a task alone
// is worked out once a task. Fragments are read three steps ahead and rows are looked up two steps
// ahead, whichever task those steps are of, so that neither is waited for.
template <typename C, bool kOfV>
__device__ __forceinline__ void gather_deep(const WgmmaParams& p, WgmmaStorage<C>& smem, int part,
                                            u8* tiles, u64 (*full)[C::kStages],
                                            u64 (*empty)[C::kStages], const TensorMap* rows,
                                            const TensorMap* whole, const u16* source,
                                            const Strides& stride) {
  static_assert(C::kTileKV == 32 * C::kGatherers, "a lane a row");
  constexpr i32 kWhole = -1;  // of a fragment that is not gathered
  const int lane = pinned(threadIdx.x & 31);
  const int own = lane / 8;  // of four rows that are copied at once, 16 bytes a lane
  const int chunk = lane % 8;
  const int slot = 1 << p.slot_log2;
  const u32 fragment_bytes = slot * C::kHeadDim * 2;
  const u32 row_bytes = static_cast<u32>(stride.row) * 2u;
  const u32 target =
      smem_address(tiles) + part * (4 * C::kGroupBytes) + own * 128 + ((chunk ^ own) << 4);
  // The row that the lane looks up: its eight lanes copy that of the i-th one in their i-th copy.
  const int column = part * 32 + chunk * 4 + own;
  const int of_fragment = pinned(column >> p.slot_log2);
  const int place = pinned(column & (slot - 1));
  const u32 lacking = pinned(C::kHeadDim - p.head_dim);  // channels

  TaskWalk<C> walk(p, smem);
  FragmentsAhead<C> ahead(p, walk.count);
  Fragment f{0, 0u};   // of the step at hand
  Fragment f1{0, 0u};  // of the step after it
  u64 f2 = 0;          // of the second step after it: one register pair, to be read into
  i32 key = kWhole;    // the row to copy in the step at hand
  i32 key1 = kWhole;   // in the step after it
  // Goes on by a step. Behind a fragment's end any row does. Moves come before the reads into what
  // they free: ptxas would put them behind, where they wait.
  auto advance = [&]() {
    f = f1;
    f1 = {pinned(static_cast<int>(f2)), static_cast<u32>(pinned(static_cast<int>(f2 >> 32)))};
    const int start = __shfl_sync(~0u, f1.start, of_fragment);
    const u32 info = __shfl_sync(~0u, f1.info, of_fragment);
    key = pinned(key1);
    key1 = (info & kGathered) == 0u ? kWhole : 0;
    if (key1 == 0 && place < static_cast<int>(info >> 24))
      key1 = __ldg(p.rows + static_cast<u32>(start + place));
    __syncwarp();
    f2 = ahead.next();
  };

  u32 stage = 0;
  u32 phases = 0;  // of releases, by (stage, warpgroup)
  u32 held = 0;    // bit (stage, warpgroup): it has a part in the stage's last step
  u32 q_phase = 0;
  bool begun = false;
  while (walk.index >= 0) {
    const Task& task = walk.task();
    if (kOfV && part == C::kGatherers - 1) {
      q_phase ^= 1u;
      load_q<C>(p, smem, task, q_phase, lane);
    }
    if (!__any_sync(~0u, begun)) {
      begun = true;
      f2 = ahead.next();
      advance();
      advance();
    }
    const u32 existing = existing_groups<C>(task.rows);
    const int batch = task.head / p.q_heads;
    const int head = task.head % p.q_heads / p.q_per_kv;
    const u64 of_lane =
        reinterpret_cast<u64>(source + batch * stride.batch + head * stride.head) + chunk * 16;
    int left = __shfl_sync(~0u, task.end - task.begin, 0);  // uniform, to ptxas as well
#pragma unroll 1
    for (; left > 0; --left) {
      const bool loaded = f.info >> 24 != 0u && (f.info & 0xffffffu) != 0u;
      const u32 parts = parts_of_step<C>(loaded, f.info, existing);
      if (parts != 0u) {
        const u32 barrier = smem_address(&full[parts - 1][stage]);
#pragma unroll
        for (int w = 0; w < C::kWarpgroups; ++w) {
          const u32 of = stage * C::kWarpgroups + w;
          if (held >> of & 1u) {
            mbarrier_wait(smem_address(&empty[w][stage]), phases >> of & 1u);
            phases ^= 1u << of;
          }
        }
        held = (held & ~(C::kAll << (stage * C::kWarpgroups))) | parts << (stage * C::kWarpgroups);
        const bool own_whole = loaded && (f.info & kGathered) == 0u && lane % C::kGatherers == part;
        const u32 wholes = __ballot_sync(~0u, own_whole);
        if (wholes != 0u) {
          if (lane == 0) mbarrier_expect(barrier, __popc(wholes) * fragment_bytes);
          __syncwarp();
          if (own_whole) {
            const u32 to = smem_address(tiles) + stage * C::kTileBytes + lane * fragment_bytes;
            if (f.start + slot <= p.whole_rows) {
              tma_load_5d(to, whole, barrier, f.start & 7, f.start >> 3,
                          batch * (p.q_heads / p.q_per_kv) + head);
            } else {
#pragma unroll 1
              for (int i = 0; i < slot / 8 * C::kSlabs; ++i)
                tma_load_4d(to + i * 1024, rows, barrier, i % C::kSlabs * 64,
                            f.start + i / C::kSlabs * 8, head, batch);
            }
          }
          __syncwarp();
        }
        // Copy i takes rows 4 i to 4 i + 3; odd ones lie 512 bytes behind even ones.
        const u32 even = target + stage * C::kTileBytes;
        const u32 odd = (even ^ 64u) + 512;
        const u32 gathered = __ballot_sync(~0u, key != kWhole);
        const u32 offset = key * row_bytes;
        if ((~gathered | lacking) == 0u) {
          u64 row[8];
#pragma unroll
          for (int i = 0; i < 8; ++i) row[i] = of_lane + __shfl_sync(~0u, offset, i, 8);
#pragma unroll
          for (int i = 0; i < 8; ++i)
#pragma unroll
            for (int slab = 0; slab < C::kSlabs; ++slab)
              cp_async16((i % 2 == 0 ? even : odd) + slab * 1024 + i / 2 * C::kGroupBytes,
                         row[i] + slab * 128, true);
        } else {
#pragma unroll 1
          for (int i = 0; i < 8; ++i) {
            if ((gathered >> i & 1u) == 0u) continue;  // four rows are of one fragment
            const u64 row = of_lane + __shfl_sync(~0u, offset, i, 8);
#pragma unroll
            for (int slab = 0; slab < C::kSlabs; ++slab)
              cp_async16((i % 2 == 0 ? even : odd) + slab * 1024 + i / 2 * C::kGroupBytes,
                         row + slab * 128, slab * 64 + chunk * 8 < p.head_dim);
          }
        }
        cp_async_arrive(barrier);
      }
      stage = stage + 1 == C::kStages ? 0 : stage + 1;
      advance();
    }
    const bool last = !walk.more();
    walk.next();
    if (last) {
      ahead.restart();
      begun = false;
    }
  }
}

// Whichever of the two is the tile's.
template <typename C, bool kOfV, typename... Arguments>
__device__ __forceinline__ void gather(Arguments&&... arguments) {
  if constexpr (C::kCopiers == 2) {
    gather_deep<C, kOfV>(arguments...);
  } else {
    gather_kv<C, kOfV>(arguments...);
  }
}

template <typename C>
struct WgmmaConsumer {
  using T = typename C::T;

  const WgmmaParams& p;
  WgmmaStorage<C>& smem;
  const int warpgroup;  // uniform, from 0
  const int warp;       // uniform, of the warpgroup
  const int lane;

  float o[C::kOut];
  float s[C::kScores];
  u32 pr[C::kScores / 2];
  float bound[2];  // of the row's scores, log2 units, a whole number; 0 before the first
  float sum[2];
  bool fresh;  // O is another task's yet
  u32 q_low;
  u32 k_low;
  u32 v_low;
  u32 k_empty;  // addresses of this warpgroup's barriers
  u32 v_empty;
  u32 k_phases;  // bit of each barrier: the phase to wait for
  u32 v_phases;
  u32 all_existing;  // membership bits of the tile's rows that exist
  u32 existing;      // those of the warpgroup, in their places

  // Lanes hold one 8-column group of a step each; those past the last group repeat the first ones.
  int column;             // of the group in its fragment
  const Fragment* frags;  // of the task's tile
  const i32* frag_bits;   // where there are token bits
  u32 frag_count;
  u32 next_index;  // of the group's fragment in the step after the one that is fetched
  u32 index_step;  // from one step to the next
  u32 info;        // Fragment::info in the step to come
  i32 bits;        // and its index into the token bits, or -1

  __device__ __forceinline__ WgmmaConsumer(const WgmmaParams& params, WgmmaStorage<C>& storage,
                                           int of_warpgroup, int of_warp)
      : p(params),
        smem(storage),
        warpgroup(of_warpgroup),
        warp(of_warp),
        lane(pinned(static_cast<int>(threadIdx.x) & 31)) {
    q_low = descriptor_low(smem_address(smem.q) + warpgroup * C::kQBytes, 16);
    k_low = descriptor_low(smem_address(smem.k), 16);
    v_low = descriptor_low(smem_address(smem.v), 1024);
    k_empty = smem_address(smem.k_empty[warpgroup]);
    v_empty = smem_address(smem.v_empty[warpgroup]);
    k_phases = v_phases = 0;
    column = pinned(group() * 8 & ((1 << p.slot_log2) - 1));
#pragma unroll
    for (int i = 0; i < C::kOut; ++i) o[i] = 0.0f;  // some number
    clear();
  }

  __device__ __forceinline__ void clear() {
    bound[0] = bound[1] = 0.0f;
    sum[0] = sum[1] = 0.0f;
    fresh = true;
  }

  __device__ __forceinline__ int group() const {
    return lane < C::kGroups ? lane : lane - C::kGroups;
  }
  __device__ __forceinline__ int columns(u32 of_step) const {
    return static_cast<int>(of_step >> 24) - column;
  }
  // Membership bits of the warp's rows, and those that exist.
  __device__ __forceinline__ u32 rows() const {
    return existing >> (warpgroup * 8 + warp * 2) & 3u;
  }
  __device__ __forceinline__ u32 own(u32 of_step) const {
    return of_step >> (warpgroup * 8 + warp * 2) & rows();
  }

  __device__ __forceinline__ void begin(const Task& task) {
    all_existing = existing_groups<C>(task.rows);
    existing = all_existing & 0xffu << (warpgroup * 8);
    frags = p.frags + task.frag_begin;
    if (C::kBits) frag_bits = p.frag_bits + task.frag_begin;
    frag_count = task.frag_count;
    index_step = C::kTileKV >> p.slot_log2;
    const int step = task.flags & kReverse ? task.end - 1 : task.begin;
    next_index = step * index_step + (group() * 8 >> p.slot_log2);
    if (task.flags & kReverse) index_step = -index_step;
    fetch();
  }

  // Moves on to the words of the next step.
  __device__ __forceinline__ void fetch() {
    const bool exists = next_index < frag_count;
    info = exists ? __ldg(&frags[next_index].info) : 0u;
    bits = C::kBits && exists ? __ldg(&frag_bits[next_index]) : -1;
    next_index += index_step;
  }

  // The warpgroups that have a part in the step that was fetched.
  __device__ __forceinline__ u32 parts() const {
    return parts_of_step<C>(columns(info) > 0, info, all_existing);
  }
  // Whether all pairs of the warpgroup's rows and that step's columns are on.
  __device__ __forceinline__ bool complete() const {
    return __all_sync(~0u, columns(info) >= 8 && (~info & existing) == 0u && bits < 0);
  }

  __device__ __forceinline__ void release(u32 barrier) const {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(barrier);
  }
  __device__ __forceinline__ void release_q() const {
    release(smem_address(&smem.q_empty[warpgroup]));
  }

  // The number of a step's barrier, of its set of warpgroups and its stage.
  static __device__ __forceinline__ u32 barrier_of(u32 parts, u32 n) {
    return (parts - 1) * C::kStages + n % C::kStages;
  }
  __device__ __forceinline__ void wait_k(u32 barrier) {
    mbarrier_wait(smem_address(&smem.k_full[0][0]) + 8 * barrier, k_phases >> barrier & 1u);
    if (C::kGather) async_proxy_fence();
    k_phases ^= 1u << barrier;
  }
  __device__ __forceinline__ void wait_v(u32 barrier) {
    mbarrier_wait(smem_address(&smem.v_full[0][0]) + 8 * barrier, v_phases >> barrier & 1u);
    if (C::kGather) async_proxy_fence();
    v_phases ^= 1u << barrier;
  }
  __device__ __forceinline__ void release_k(u32 barrier) const {
    release(k_empty + barrier % C::kStages * 8);
  }
  __device__ __forceinline__ void release_v(u32 barrier) const {
    release(v_empty + barrier % C::kStages * 8);
  }

  // In steps of all warpgroups they take turns at issuing products: those of one run under the
  // softmax of the others.
  __device__ __forceinline__ void take_turn() const { named_barrier_sync(4 + warpgroup, 256); }
  __device__ __forceinline__ void give_turn() const {
    named_barrier_arrive(4 + (warpgroup + 1) % C::kWarpgroups, 256);
  }

  // S = Q K^T.
  __device__ __forceinline__ void start_qk(u32 stage) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < C::kHeadDim / 16; ++k) {
      const u64 a = descriptor(q_low + (k / 4) * 512 + (k % 4) * 2, 1024);
      const u64 b = descriptor(k_low + stage * (C::kTileBytes / 16) + (k / 4) * 64 + (k % 4) * 2,
                               C::kGroupBytes);
      if (k == 0) {
        wgmma_qk(T{}, s, a, b);
      } else {
        wgmma_qk_add(T{}, s, a, b);
      }
    }
    wgmma_commit();
  }

  // O += P V, or O = P V where it is the task's first product. That is no assignment of zeros
  // beforehand, as ptxas would serialise the products of the task before with it (C7515).
  __device__ __forceinline__ void start_pv(u32 stage) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < C::kTileKV / 16; ++k) {
      const u64 b = descriptor(v_low + stage * (C::kTileBytes / 16) + k * (2 * C::kGroupBytes / 16),
                               C::kGroupBytes);
      if (k == 0) {
        wgmma_pv(T{}, o, pr, b, !fresh);
      } else {
        wgmma_pv_add(T{}, o, pr + 4 * k, b);
      }
    }
    wgmma_commit();
    fresh = false;
  }

  template <typename Clock>
  __device__ __forceinline__ void run(const Clock& clock) {
    StepCount n;
    u32 q_phase = 0;
    bool pending = false;  // P waits for its product
    u32 of_pending = 0;    // the barrier of its step
    bool skipped = false;  // the step before was one of other warpgroups
    int carried = -1;      // the task of P, where it is the one before
    if (warpgroup == C::kWarpgroups - 1) give_turn();

    TaskWalk<C> walk(p, smem);
    if (walk.index >= 0) begin(walk.task());
    while (walk.index >= 0) {
      const Task& task = walk.task();
      const u32 steps = task.end - task.begin;
      clock.begin(walk.index);
      n.begin(walk.twin());
      mbarrier_wait(smem_address(&smem.q_full[warpgroup]), q_phase);
      q_phase ^= 1;
      if (p.negate) negate_q();

      u32 left = steps;
      if (carried >= 0) {
        const u32 of_step = info;
        const i32 of_bits = bits;
        const u32 members = parts();
        const bool whole = complete();
        const u32 barrier = barrier_of(members, n.value);
        const bool turns = members == C::kAll;
        fetch();
        wait_k(barrier);
        if (turns) take_turn();
        start_qk(n.value % C::kStages);
        wait_v(of_pending);
        start_pv(of_pending % C::kStages);
        if (turns) give_turn();
        wgmma_wait<0>();
        release_k(barrier);
        release_v(of_pending);
        if (left == 1) release_q();
        finish(p.tasks[carried]);
        clock.end(carried);
        carried = -1;
        clear();
        softmax<true>(of_step, of_bits, whole, walk.second(), false, of_pending);
        of_pending = barrier;
        skipped = false;
        --left;
        ++n.value;
      }
      for (; left > 0; --left, ++n.value) {
        const u32 of_step = info;
        const i32 of_bits = bits;
        const u32 members = parts();
        const bool whole = complete();
        fetch();
        if ((members >> warpgroup & 1u) == 0u) {
          // P may wait for one such step, but not while its stage of V is wanted for another.
          if (pending && skipped) {
            finish_pv(of_pending);
            pending = false;
          }
          skipped = true;
          if (left == 1) release_q();
          continue;
        }
        const u32 barrier = barrier_of(members, n.value);
        const bool turns = members == C::kAll;
        wait_k(barrier);
        if (turns) take_turn();
        start_qk(n.value % C::kStages);
        if (pending) {
          wait_v(of_pending);
          start_pv(of_pending % C::kStages);
          if (turns) give_turn();
          wgmma_wait<1>();
        } else {
          if (turns) give_turn();
          wgmma_wait<0>();
        }
        release_k(barrier);
        if (left == 1) release_q();
        softmax<false>(of_step, of_bits, whole, walk.second(), pending, of_pending);
        pending = true;
        of_pending = barrier;
        skipped = false;
      }
      if (steps == 0) release_q();
      const int done = walk.index;
      if (walk.more()) {
        const Task& next = p.tasks[done + gridDim.x];
        begin(next);
        if (pending && next.end > next.begin && (parts() >> warpgroup & 1u) != 0u) carried = done;
      }
      if (carried < 0) {
        if (pending) finish_pv(of_pending);
        pending = false;
        finish(p.tasks[done]);
        clock.end(done);
        clear();
      }
      const bool last = !walk.more();
      walk.next();
      if (last && walk.index >= 0) begin(walk.task());
    }
    if (warpgroup == 0) take_turn();  // the one that nobody took
  }

  __device__ __forceinline__ void finish_pv(u32 barrier) {
    wait_v(barrier);
    start_pv(barrier % C::kStages);
    wgmma_wait<0>();
    release_v(barrier);
  }

  // P of four scores from their rows' bounds, and the sums over it. What surrounds ex2, whose unit
  // takes a warp's value every 8 cycles, costs no time.
  __device__ __forceinline__ void exponentiate(int g, const float (&low)[2], float (&part)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& x = s[4 * g + e];
      x = exp2_approx(fmaf(x, p.scale_log2, low[e >> 1]));
      part[e] += x;
    }
  }

  // Scores of pairs that are off become -inf: by membership, by columns that the fragment lacks,
  // and by token bits, of which a byte holds 8 columns of a row. A loop, as it runs at the ends of
  // lists and need not fill the instruction cache.
  __device__ __forceinline__ void mask(u32 of_step, i32 of_bits) {
    const int have = columns(of_step);
    const u32 words = static_cast<u32>(have > 0 ? have : 0) << 2 | own(of_step);
    const int first = (lane & 3) * 2;
    const int slot = 1 << p.slot_log2;
    const int row_bytes = slot > 32 ? slot / 8 : 4;
    const i64 row = warpgroup * 64 + warp * 16 + (lane >> 2);
#pragma unroll
    for (int part = 0; part < C::kGroups / 8; ++part) {
      u32 on = 0;  // four bits a group, the first one's the lowest
#pragma unroll 1
      for (int g = part * 8; g < part * 8 + 8; ++g) {
        const u32 word = __shfl_sync(~0u, words, g);
        // Of the thread's two rows, the columns of the group that are on.
        const u32 exist = word >> 2 < 8 ? (1u << (word >> 2)) - 1u : 0xffu;
        u32 upper = word & 1u ? exist : 0u;
        u32 lower = word & 2u ? exist : 0u;
        if (C::kBits) {
          const i32 index = __shfl_sync(~0u, of_bits, g);
          if (index >= 0) {
            const u8* byte = reinterpret_cast<const u8*>(p.bits) +
                             (index * static_cast<i64>(C::kTileQ) + row) * row_bytes +
                             (g * 8 & (slot - 1)) / 8;
            upper &= __ldg(byte);
            lower &= __ldg(byte + 8 * row_bytes);
          }
        }
        on = on >> 4 | (upper >> first & 3u) << 28 | (lower >> first & 3u) << 30;
      }
#pragma unroll
      for (int i = 0; i < 32; ++i)
        if (!(on >> i & 1u)) s[part * 32 + i] = negative_infinity();
    }
  }

  // P of a step from its scores; on return nothing is under way and P may be multiplied.
  template <bool kFirst>  // of the task
  __device__ __forceinline__ void softmax(u32 of_step, i32 of_bits, bool whole, bool careful,
                                          bool pending, u32 of_pending) {
    float factor[2] = {1.0f, 1.0f};
    float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    // Some row has no bound yet, or none can be relied on.
    const u32 unbounded = (sum[0] == 0.0f ? 1u : 0u) | (sum[1] == 0.0f ? 2u : 0u);
    const bool search =
        kFirst || __any_sync(~0u, ((unbounded & rows()) | (careful ? 4u : 0u)) != 0u);
    const bool on = own(of_step) != 0u && columns(of_step) > 0;
    // Where every two groups are on or off for all 16 rows of the warp, a bit decides. Those two
    // are of one fragment, unless fragments are shorter.
    const int both = column & 8 ? 8 : 16;
    const bool by_group =
        !kFirst && !whole &&
        __all_sync(~0u, !search && p.slot_log2 > 3 && of_bits < 0 &&
                            (!on || (own(of_step) == rows() && columns(of_step) >= both)));
    if (!whole) {
      if (by_group) {
        const u32 groups = __ballot_sync(~0u, on);
#pragma unroll
        for (int g = 0; g < C::kGroups; ++g) {
          const bool group_on = groups >> (g & ~1) & 1u;
          const float low[2] = {group_on ? -bound[0] : negative_infinity(),
                                group_on ? -bound[1] : negative_infinity()};
          exponentiate(g, low, part);
        }
      } else {
        mask(of_step, of_bits);
      }
    }
    if (search) find_bounds(factor);
    if (!by_group) {
      const float low[2] = {-bound[0], -bound[1]};
#pragma unroll
      for (int g = 0; g < C::kGroups; ++g) exponentiate(g, low, part);
    }
    const float row_part[2] = {part[0] + part[1], part[2] + part[3]};
    sum[0] += row_part[0];
    sum[1] += row_part[1];
    bool scaled = search;
    if (!kFirst) {
      if (__any_sync(~0u, !(row_part[0] < C::kHigh && row_part[1] < C::kHigh))) {
        scaled = true;
        raise(row_part, factor);
      }
    }
    // Never true. Without it ptxas waits for the products before the exponentials.
    if (row_part[0] + row_part[1] < 0.0f) nanosleep();
    wgmma_wait<0>();
    if (pending) release_v(of_pending);
#pragma unroll
    for (int i = 0; i < C::kScores / 2; ++i) pr[i] = pack2<T>(s[2 * i], s[2 * i + 1]);
    if (!kFirst && scaled) {
#pragma unroll
      for (int g = 0; g < C::kOut / 4; ++g) {
        o[4 * g] *= factor[0];
        o[4 * g + 1] *= factor[0];
        o[4 * g + 2] *= factor[1];
        o[4 * g + 3] *= factor[1];
      }
    }
  }

  // Moves the bounds of the warp's rows up to the largest score so far; the sums follow.
  __device__ __forceinline__ void find_bounds(float (&factor)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = s[2 * r];
#pragma unroll
      for (int g = 0; g < C::kGroups; ++g)
        top = fmaxf(top, fmaxf(s[4 * g + 2 * r], s[4 * g + 2 * r + 1]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      top *= p.scale_log2;
      const u32 quad = 0xfu << (lane & ~3);
      const bool first = (__ballot_sync(~0u, sum[r] == 0.0f) & quad) == quad;
      const bool moves = top > negative_infinity() && (first || top > bound[r]);
      const float raised = moves ? ceilf(top) : bound[r];
      factor[r] = first ? 1.0f : exp2_approx(bound[r] - raised);
      sum[r] *= factor[r];
      bound[r] = raised;
    }
  }

  // Moves the bounds of rows with a large P; it is scaled, as are the sums so far.
  __device__ __forceinline__ void raise(const float (&row_part)[2], float (&factor)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = row_part[r];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      // Further up, 2^-by would be no normal number, and ex2 makes those zeros.
      // A vote, as a store by some lanes alone would be a divergent branch to ptxas, within which
      // it uses no uniform registers.
      if (__any_sync(~0u, !(total < 1e37f))) smem.again = 1u;
      const float by = total < C::kHigh ? 0.0f : ceilf(log2_approx(total));
      const float scale = exp2_approx(-by);
      factor[r] *= scale;
      sum[r] *= scale;
      bound[r] += by;
#pragma unroll
      for (int g = 0; g < C::kGroups; ++g) {
        s[4 * g + 2 * r] *= scale;
        s[4 * g + 2 * r + 1] *= scale;
      }
    }
  }

  __device__ __forceinline__ void negate_q() {
    u32* words = reinterpret_cast<u32*>(smem.q + warpgroup * C::kQBytes);
    for (int i = warp * 32 + lane; i < C::kQBytes / 4; i += 128) words[i] ^= 0x80008000u;
    async_proxy_fence();
    named_barrier_sync(1 + warpgroup, 128);
  }

  __device__ __forceinline__ void finish(const Task& task) {
    const int lacking = lacking_rows<C>(task);
    const int warp_row =
        task.units < 0 ? task.first_row + warpgroup * 64 + warp * 16 - (warpgroup > 0 ? lacking : 0)
                       : __ldg(p.units + task.units + warpgroup * 4 + warp);
    // Of the tile, where the warpgroup's rows end.
    const int end = warpgroup == 0 && lacking > 0 ? 64 - lacking : rows_of(task.rows) + lacking;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
      sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
    }
    const int tile_row = warpgroup * 64 + warp * 16 + (lane >> 2);
    if (task.slot >= 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = tile_row + 8 * r;
        if (row >= end) continue;
        const i64 index = static_cast<i64>(task.slot) * C::kTileQ + row;
        float2* target = reinterpret_cast<float2*>(p.partial_o + index * C::kHeadDim);
#pragma unroll
        for (int g = 0; g < C::kOut / 4; ++g)
          target[g * 4 + (lane & 3)] = sum[r] != 0.0f
                                           ? make_float2(o[4 * g + 2 * r], o[4 * g + 2 * r + 1])
                                           : make_float2(0.0f, 0.0f);
        if ((lane & 3) == 0)
          reinterpret_cast<float2*>(p.partial_ml)[index] =
              make_float2(sum[r] != 0.0f ? bound[r] : negative_infinity(), sum[r]);
      }
      return;
    }
    u16* out = static_cast<u16*>(p.o) + (task.head / p.q_heads) * p.o_stride.batch +
               (task.head % p.q_heads) * p.o_stride.head;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool exists = tile_row + 8 * r < end;
      const i64 row = warp_row + (lane >> 2) + 8 * r;
      const bool any = sum[r] != 0.0f;
      const float inverse = 1.0f / sum[r];
#pragma unroll
      for (int g = 0; g < C::kOut / 4; g += 4) {
        // Four lanes hold two columns of each of four 8-column groups: a transpose over them leaves
        // each with the 16 bytes of one group.
        u32 x[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
          x[j] =
              any ? pack2<T>(o[4 * (g + j) + 2 * r] * inverse, o[4 * (g + j) + 2 * r + 1] * inverse)
                  : 0u;
        transpose(x);
        const int column = (g + (lane & 3)) * 8;
        if (exists && column < p.head_dim)
          *reinterpret_cast<uint4*>(out + row * p.o_stride.row + column) =
              make_uint4(x[0], x[1], x[2], x[3]);
      }
      if (p.lse != nullptr && (lane & 3) == 0 && exists) {
        p.lse[static_cast<i64>(task.head) * p.sq + row] =
            sum[r] != 0.0f ? (bound[r] + log2_approx(sum[r])) * 0.6931471805599453f
                           : negative_infinity();
      }
    }
  }

  // x[j] of lane i of each four lanes becomes x[i] of lane j.
  __device__ __forceinline__ void transpose(u32 (&x)[4]) const {
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
      const bool upper = lane & bit;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j & bit) continue;
        const u32 got = __shfl_xor_sync(~0u, upper ? x[j] : x[j + bit], bit);
        if (upper) {
          x[j] = got;
        } else {
          x[j + bit] = got;
        }
      }
    }
  }
};

template <typename C, typename Clock = NoClock>
__device__ __forceinline__ void attend_wgmma(const WgmmaParams& params, TaskTime* times = nullptr) {
  extern __shared__ __align__(1024) u8 dynamic_smem[];
  WgmmaStorage<C>& smem = *reinterpret_cast<WgmmaStorage<C>*>(dynamic_smem);
  // V rows that no fragment fills are multiplied by zeros: they must be numbers.
  for (int i = threadIdx.x; i < C::kStages * C::kTileBytes / 16; i += C::kThreads)
    reinterpret_cast<uint4*>(smem.v)[i] = make_uint4(0, 0, 0, 0);
  for (int i = threadIdx.x; i < C::kStages * C::kTileBytes / 16; i += C::kThreads)
    reinterpret_cast<uint4*>(smem.k)[i] = make_uint4(0, 0, 0, 0);
  if (threadIdx.x == 0) {
    smem.again = 0u;
    for (int w = 0; w < C::kWarpgroups; ++w) {
      mbarrier_init(smem_address(&smem.q_full[w]), 1);
      mbarrier_init(smem_address(&smem.q_empty[w]), 4);
    }
    for (int stage = 0; stage < C::kStages; ++stage) {
      for (int set = 0; set < C::kSets; ++set) {
        mbarrier_init(smem_address(&smem.k_full[set][stage]), C::kArrivals);
        mbarrier_init(smem_address(&smem.v_full[set][stage]), C::kArrivals);
      }
      for (int w = 0; w < C::kWarpgroups; ++w) {  // each of its warps releases
        mbarrier_init(smem_address(&smem.k_empty[w][stage]), 4);
        mbarrier_init(smem_address(&smem.v_empty[w][stage]), 4);
      }
      mbarrier_init(smem_address(&smem.k_ready[stage]), 1);
      mbarrier_init(smem_address(&smem.v_ready[stage]), 1);
    }
    mbarrier_init_fence();
  }
  async_proxy_fence();
  __syncthreads();
  if (C::kTwins) cluster_sync();
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32 % 4, 0);
  if (warpgroup < C::kCopiers) {
    registers_decrease<C::kProducerRegisters>();
    if constexpr (C::kGather) {
      const int part = (C::kCopiers == 2 ? 2 * warpgroup : 0) + warp / 2;
      if (warp % 2 == 0) {
        gather<C, false>(params, smem, part, smem.k, smem.k_full, smem.k_empty, &params.k_rows,
                         &params.k_fragment, params.k, params.k_stride);
      } else {
        gather<C, true>(params, smem, part, smem.v, smem.v_full, smem.v_empty, &params.v_rows,
                        &params.v_fragment, params.v, params.v_stride);
      }
    } else {
      if (warp == 0)
        copy_kv<C>(params, smem, smem.k, smem.k_full, smem.k_empty, smem.k_ready, &params.k_rows,
                   &params.k_fragment);
      if (warp == 1)
        copy_kv<C>(params, smem, smem.v, smem.v_full, smem.v_empty, smem.v_ready, &params.v_rows,
                   &params.v_fragment);
      if (warp == 2) copy_q<C>(params, smem);
    }
  } else {
    registers_increase<C::kConsumerRegisters>();
    const int multiplies = warpgroup - C::kCopiers;
    const Clock clock(times, multiplies, C::kWarpgroups, threadIdx.x % 128 == 0);
    WgmmaConsumer<C>(params, smem, multiplies, warp).run(clock);
  }
  // Neither CTA may end while the other writes to its memory.
  if (C::kTwins) cluster_sync();
}

// The same, keeping time: each warpgroup that multiplies is a part of its own. As its last product
// with V runs beside the next task's first with K, a task may end after the next one has begun.
template <typename C>
__device__ __forceinline__ void attend_wgmma(const Timed<WgmmaParams>& timed) {
  attend_wgmma<C, TaskClock>(timed.params, timed.times);
}

}  // namespace tessera

// The one entry of a specialisation, and the one that keeps time: element type, head dim, tile
// rows, tile columns, stages, whether pairs of CTAs share lists, whether fragments have token bits,
// whether their rows may lie anywhere.
#define TESSERA_CLUSTER_true __cluster_dims__(2, 1, 1)
#define TESSERA_CLUSTER_false
#define TESSERA_ATTEND_WGMMA(...) TESSERA_ATTEND_WGMMA_OF(tessera::WgmmaParams, __VA_ARGS__)
#define TESSERA_ATTEND_WGMMA_TIMED(...) \
  TESSERA_ATTEND_WGMMA_OF(tessera::Timed<tessera::WgmmaParams>, __VA_ARGS__)
#define TESSERA_ATTEND_WGMMA_OF(PARAMS, T, kHeadDim, kTileQ, kTileKV, kStages, kTwins, kBits,  \
                                kGather)                                                       \
  extern "C" __global__ void TESSERA_CLUSTER_##kTwins __launch_bounds__(                       \
      tessera::WgmmaConfig<tessera::T, kHeadDim, kTileQ, kTileKV, kStages, kTwins, kBits,      \
                           kGather>::kThreads,                                                 \
      1) attend(const __grid_constant__ PARAMS params) {                                       \
    tessera::attend_wgmma<tessera::WgmmaConfig<tessera::T, kHeadDim, kTileQ, kTileKV, kStages, \
                                               kTwins, kBits, kGather>>(params);               \
  }
