// Block-sparse attention forward with wgmma and the tensor copy engine, for Hopper (sm_90a).
//
//   O[r] = sum_c P[r, c] V[c] / sum_c P[r, c],   P[r, c] = exp(scale * Q[r] . K[c])
//   over the key rows c that the tile's fragments list for row r; LSE[r] = ln sum_c P[r, c].
//
// A CTA takes tasks in turn: 128 query rows, neighbours or units of 16 from anywhere, and KV steps
// of 192 columns filled from fragments of 8 to 64 rows that lie anywhere.
//
// Roles: in warpgroup 0, warp 0 copies K, warp 1 V and warp 2 Q; warpgroups 1 and 2 multiply 64
// query rows each. A warpgroup that has no row in a step skips it. In the others the product of a
// step's K runs, then under its softmax the product of the step before with V. Registers hold O,
// one S and one P.
//
// Shared memory: Q [warpgroup][64-column slab][64 rows][128 B]; two stages each of K and V
// [8-row group][slab][8 rows][128 B], so a fragment of any multiple of 8 rows is one run of bytes
// and descriptors have fixed strides. All in the 128-byte swizzle. At head dim 128: 32 + 4 * 48 KB.
#pragma once

#include "common/ptx.cuh"
#include "common/ptx_hopper.cuh"
#include "common/types.cuh"

namespace tessera {

template <typename T_, int kHeadDim_, int kTileQ_, int kTileKV_>
struct WgmmaConfig {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kTileQ = kTileQ_;
  static constexpr int kTileKV = kTileKV_;
  static constexpr int kStages = 2;
  static constexpr int kWarpgroups = kTileQ / 64;
  static constexpr int kThreads = 128 * (1 + kWarpgroups);
  static constexpr int kSlabs = kHeadDim / 64;
  static constexpr int kQBytes = 64 * kHeadDim * 2;  // of one warpgroup
  static constexpr int kTileBytes = kTileKV * kHeadDim * 2;
  static constexpr int kGroupBytes = 8 * kHeadDim * 2;
  static constexpr int kOut = kHeadDim / 2;    // O registers of a thread
  static constexpr int kScores = kTileKV / 2;  // S registers of a thread
  static constexpr int kGroups = kTileKV / 8;
  // P stays below 1, and its largest element at or above 2^-kLag at the last change of the bound:
  // further down, float16 would lose bits of the small ones.
  static constexpr float kLag = is_same<T, half_t> ? 4.0f : 8.0f;
  static_assert(kHeadDim == 64 || kHeadDim == 128, "one or two slabs of 64 columns");
  static_assert(kTileKV % 16 == 0 && kGroups <= 32, "a lane holds the word of one column group");
  static_assert(kTileQ == 128 || kTileQ == 192, "two or three warpgroups of 64 rows");
  // Registers of a thread: the producer's and a consumer's.
  static constexpr int kProducerRegisters = kWarpgroups == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kWarpgroups == 2 ? 240 : 160;
};

template <typename C>
struct WgmmaStorage {
  alignas(1024) u8 q[C::kWarpgroups * C::kQBytes];
  alignas(1024) u8 k[C::kStages * C::kTileBytes];
  alignas(1024) u8 v[C::kStages * C::kTileBytes];
  alignas(8) u64 q_full[C::kWarpgroups];
  u64 q_empty[C::kWarpgroups];
  u64 k_full[C::kStages];
  u64 k_empty[C::kStages];
  u64 v_full[C::kStages];
  u64 v_empty[C::kStages];
};

// The warp that copies Q: 16 rows a box, as the rows of a tile may lie apart.
template <typename C>
__device__ __forceinline__ void copy_q(const WgmmaParams& p, WgmmaStorage<C>& smem) {
  const int lane = threadIdx.x & 31;
  u32 phase = 1;
  for (int t = blockIdx.x; t < p.task_count; t += gridDim.x) {
    const Task& task = p.tasks[t];
    for (int w = 0; w < C::kWarpgroups; ++w) {
      mbarrier_wait(smem_address(&smem.q_empty[w]), phase);
      const u32 barrier = smem_address(&smem.q_full[w]);
      if (lane == 0) mbarrier_arrive_expect(barrier, C::kQBytes);
      __syncwarp();
      if (lane < 4 * C::kSlabs) {
        const int unit = w * 4 + lane % 4;
        const int row =
            task.units < 0 ? task.first_row + unit * 16 : __ldg(p.units + task.units + unit);
        // Rows that do not exist are zeros from beyond the last one.
        tma_load_4d(smem_address(smem.q) + w * C::kQBytes + lane / 4 * 8192 + lane % 4 * 2048, &p.q,
                    barrier, lane / 4 * 64, row < 0 ? p.sq : row, task.head % p.q_heads,
                    task.head / p.q_heads);
      }
      __syncwarp();
    }
    phase ^= 1;
  }
}

// The warp that copies K, or V: a lane a fragment, through the map of whole fragments where it can.
template <typename C>
__device__ __forceinline__ void copy_kv(const WgmmaParams& p, u8* tiles, u64* full, u64* empty,
                                        const TensorMap* rows, const TensorMap* whole) {
  const int lane = threadIdx.x & 31;
  const int slot = 1 << p.slot_log2;
  const int fragments = C::kTileKV >> p.slot_log2;
  const u32 fragment_bytes = slot * C::kHeadDim * 2;
  u32 n = 0;

  for (int t = blockIdx.x; t < p.task_count; t += gridDim.x) {
    const Task task = p.tasks[t];
    const int batch = task.head / p.q_heads;
    const int head = task.head % p.q_heads / p.q_per_kv;
    const int steps = task.end - task.begin;

    auto fetch = [&](int i) {
      const int step = task.reverse ? task.end - 1 - i : task.begin + i;
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
    for (int i = 0; i < steps; ++i, ++n) {
      const u32 stage = n % C::kStages;
      mbarrier_wait(smem_address(&empty[stage]), (n / C::kStages & 1) ^ 1);
      const int length = f.info >> 24;
      const bool loaded = length > 0 && (f.info & 0xffffffu) != 0;
      const u32 bytes = __popc(__ballot_sync(~0u, loaded)) * fragment_bytes;
      const u32 barrier = smem_address(&full[stage]);
      if (lane == 0) mbarrier_arrive_expect(barrier, bytes);
      __syncwarp();
      if (loaded) {
        const u32 target = smem_address(tiles) + stage * C::kTileBytes + lane * fragment_bytes;
        if (length == slot && (f.start & 7) == 0 && f.start + slot <= p.whole_rows) {
          tma_load_5d(target, whole, barrier, f.start >> 3,
                      batch * (p.q_heads / p.q_per_kv) + head);
        } else {
          for (int g = 0; g < slot / 8; ++g)
            for (int slab = 0; slab < C::kSlabs; ++slab)
              tma_load_4d(target + (g * C::kSlabs + slab) * 1024, rows, barrier, slab * 64,
                          f.start + g * 8, head, batch);
        }
      }
      __syncwarp();
      f = fetch(i + 1);
    }
  }
}

template <typename C>
struct WgmmaConsumer {
  using T = typename C::T;

  const WgmmaParams& p;
  WgmmaStorage<C>& smem;
  const int warpgroup;  // uniform, 0 or 1
  const int warp;       // uniform, of the warpgroup
  const int lane;

  float o[C::kOut];
  float s[C::kScores];
  u32 pr[C::kScores / 2];
  float bound[2];  // of the row's scores so far, log2 units, a whole number; 0 before the first
  float sum[2];
  u32 q_low;
  u32 k_low;
  u32 v_low;
  u32 all_existing;  // membership bits of the tile's rows that exist
  u32 existing;      // those of the warpgroup
  u32 info;          // Fragment::info of this lane's 8-column group in the step to come
  int next_index;    // of the fragment in the task's list

  __device__ __forceinline__ void release(u64* barrier) const {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(smem_address(barrier));
  }

  // Lanes hold one 8-column group of a step each; those past the last group repeat the first ones.
  __device__ __forceinline__ int group() const {
    return lane < C::kGroups ? lane : lane - C::kGroups;
  }
  __device__ __forceinline__ int column_in_fragment() const {
    return group() * 8 & ((1 << p.slot_log2) - 1);
  }

  // Moves `info` on to the next step of the task.
  __device__ __forceinline__ void fetch(const Task& task) {
    info = static_cast<u32>(next_index) < static_cast<u32>(task.frag_count)
               ? __ldg(&p.frags[task.frag_begin + next_index].info)
               : 0u;
    const int fragments = C::kTileKV >> p.slot_log2;
    next_index += task.reverse ? -fragments : fragments;
  }
  __device__ __forceinline__ int first_index(const Task& task) const {
    const int step = task.reverse ? task.end - 1 : task.begin;
    return step * (C::kTileKV >> p.slot_log2) + (group() * 8 >> p.slot_log2);
  }
  __device__ __forceinline__ void fetch_first(const Task& task) {
    next_index = first_index(task);
    fetch(task);
  }

  // The warpgroup's part in the step of this info: 0 none, 1 some pairs, 2 all. Uniform over the
  // warpgroup, as wgmma is.
  __device__ __forceinline__ int part(u32 of_step) const {
    const u32 members = (of_step >> (warpgroup * 8)) & existing;
    const int columns = static_cast<int>(of_step >> 24) - column_in_fragment();
    const bool any = __any_sync(~0u, columns > 0 && members != 0u);
    const bool all = __all_sync(~0u, columns >= 8 && members == existing);
    return !any ? 0 : all ? 2 : 1;
  }

  // Whether every warpgroup has a part in the step: they all see the same words.
  __device__ __forceinline__ bool common(u32 of_step) const {
    const bool exists = static_cast<int>(of_step >> 24) > column_in_fragment();
    bool all = true;
#pragma unroll
    for (int w = 0; w < C::kWarpgroups; ++w)
      all &=
          __any_sync(~0u, exists && (of_step >> (w * 8) & all_existing >> (w * 8) & 0xffu) != 0u);
    return all;
  }

  // In common steps the warpgroups take turns at the exponentials, whose unit they share, so that
  // each has products under way while another is at its softmax.
  __device__ __forceinline__ void take_turn() const { named_barrier_sync(4 + warpgroup, 256); }
  __device__ __forceinline__ void give_turn() const {
    named_barrier_arrive(4 + (warpgroup + 1) % C::kWarpgroups, 256);
  }

  // S over what mask() left there or over zeros.
  __device__ __forceinline__ void start_qk(u32 stage, bool masked) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < C::kHeadDim / 16; ++k) {
      const u64 a = descriptor(q_low + (k / 4) * 512 + (k % 4) * 2, 1024);
      const u64 b = descriptor(k_low + stage * (C::kTileBytes / 16) + (k / 4) * 64 + (k % 4) * 2,
                               C::kGroupBytes);
      if (k == 0) {
        wgmma_qk(T{}, s, a, b, masked);
      } else {
        wgmma_qk_add(T{}, s, a, b);
      }
    }
    wgmma_commit();
  }

  // O += P V.
  __device__ __forceinline__ void start_pv(u32 stage) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < C::kTileKV / 16; ++k) {
      const u64 b = descriptor(v_low + stage * (C::kTileBytes / 16) + k * (2 * C::kGroupBytes / 16),
                               C::kGroupBytes);
      wgmma_pv(T{}, o, pr + 4 * k, b);
    }
    wgmma_commit();
  }

  // Scores that are off start from -inf, the others from 0. Where every group is on or off for all
  // 16 rows of the warp, one bit a group decides.
  __device__ __forceinline__ void mask(u32 of_step) {
    const u32 rows = (existing >> (warp * 2)) & 3u;
    const u32 own = (of_step >> (warpgroup * 8 + warp * 2)) & rows;
    const int columns = static_cast<int>(of_step >> 24) - column_in_fragment();
    const bool on = own != 0u && columns > 0;
    if (__all_sync(~0u, !on || (own == rows && columns >= 8))) {
      const u32 groups = __ballot_sync(~0u, on);
#pragma unroll
      for (int g = 0; g < C::kGroups; ++g) {
        const float start = (groups >> g) & 1u ? 0.0f : negative_infinity();
#pragma unroll
        for (int e = 0; e < 4; ++e) s[4 * g + e] = start;
      }
      return;
    }
    const u32 words = (static_cast<u32>(columns > 0 ? columns : 0) << 2) | own;
    const int column = (lane & 3) * 2;
#pragma unroll
    for (int g = 0; g < C::kGroups; ++g) {
      const u32 word = __shfl_sync(~0u, words, g);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool on_pair = ((word >> (e >> 1)) & 1u) && column + (e & 1) < (word >> 2);
        s[4 * g + e] = on_pair ? 0.0f : negative_infinity();
      }
    }
  }

  static __device__ __forceinline__ u32 stage_of(u32 n) { return n % C::kStages; }
  static __device__ __forceinline__ u32 phase_of(u32 n) { return (n / C::kStages) & 1; }

  __device__ __forceinline__ void run() {
    q_low = descriptor_low(smem_address(smem.q) + warpgroup * C::kQBytes, 16);
    k_low = descriptor_low(smem_address(smem.k), 16);
    v_low = descriptor_low(smem_address(smem.v), 1024);
    if (warpgroup == C::kWarpgroups - 1) give_turn();
    u32 first = 0;  // number of the task's first step
    u32 q_phase = 0;
    for (int t = blockIdx.x; t < p.task_count; t += gridDim.x) {
      const Task task = p.tasks[t];
      all_existing = task.rows == C::kTileQ ? ~0u : (1u << ((task.rows + 7) / 8)) - 1u;
      existing = (all_existing >> (warpgroup * 8)) & 0xffu;
      bound[0] = bound[1] = 0.0f;
      sum[0] = sum[1] = 0.0f;
#pragma unroll
      for (int i = 0; i < C::kOut; ++i) o[i] = 0.0f;
      fetch_first(task);
      const int next = t + gridDim.x;
      if (next < p.task_count) prefetch(p.tasks + next);
      mbarrier_wait(smem_address(&smem.q_full[warpgroup]), q_phase);
      q_phase ^= 1;
      if (p.negate) negate_q();

      const u32 steps = task.end - task.begin;
      bool pending = false;  // P of the step before waits for its product
      for (u32 i = 0; i < steps; ++i) {
        const u32 n = first + i;
        const u32 stage = stage_of(n);
        const u32 phase = phase_of(n);
        const u32 of_step = info;
        const int how = part(of_step);
        mbarrier_wait(smem_address(&smem.k_full[stage]), phase);
        if (how == 0) {
          fetch(task);
          // A step of other warpgroups goes by. Nothing may wait meanwhile for its stages.
          if (pending) finish_pv(n - 1);
          pending = false;
          release(&smem.k_empty[stage]);
          mbarrier_wait(smem_address(&smem.v_full[stage]), phase);
          release(&smem.v_empty[stage]);
          continue;
        }
        if (how != 2) mask(of_step);
        start_qk(stage, how != 2);
        const bool turns = common(of_step);
        fetch(task);
        if (pending) {
          mbarrier_wait(smem_address(&smem.v_full[stage_of(n - 1)]), phase_of(n - 1));
          start_pv(stage_of(n - 1));
          wgmma_wait<1>();
        } else {
          wgmma_wait<0>();
        }
        release(&smem.k_empty[stage]);
        if (turns) take_turn();
        softmax(turns, pending, stage_of(n - 1));
        pending = true;
      }
      // The next task's Q and first fragments may come while this one's output is made.
      release(&smem.q_empty[warpgroup]);
      if (next < p.task_count) {
        const Task& other = p.tasks[next];
        prefetch(p.frags + other.frag_begin + first_index(other));
      }
      const int warp_row = task.units < 0 ? task.first_row + warpgroup * 64 + warp * 16
                                          : __ldg(p.units + task.units + warpgroup * 4 + warp);
      if (pending) finish_pv(first + steps - 1);
      first += steps;
      finish(task, warp_row);
    }
    if (warpgroup == 0) take_turn();  // the one that nobody took
  }

  __device__ __forceinline__ void finish_pv(u32 n) {
    mbarrier_wait(smem_address(&smem.v_full[stage_of(n)]), phase_of(n));
    start_pv(stage_of(n));
    wgmma_wait<0>();
    release(&smem.v_empty[stage_of(n)]);
  }

  // P of a step from its scores; on return nothing is under way and P may be multiplied.
  __device__ __forceinline__ void softmax(bool turns, bool pending, u32 pending_stage) {
    // The bound may lie above the row's largest score. Only a score that reaches it, whose
    // difference has no minus sign, or the row's first one that is on, makes the warp look for the
    // maximum: the AND of the differences tells.
    u32 bits[2] = {~0u, ~0u};
#pragma unroll
    for (int i = 0; i < C::kScores; i += 2) {
      const int r = i >> 1 & 1;
      s[i] = fmaf(s[i], p.scale_log2, -bound[r]);
      s[i + 1] = fmaf(s[i + 1], p.scale_log2, -bound[r]);
      bits[r] = and_bits(bits[r], s[i], s[i + 1]);
    }
    constexpr u32 kOff = 0xff800000u;  // -inf
    const bool grown = __any_sync(~0u, static_cast<int>(bits[0] & bits[1]) >= 0 ||
                                           (sum[0] == 0.0f && bits[0] != kOff) ||
                                           (sum[1] == 0.0f && bits[1] != kOff));
    float factor[2] = {1.0f, 1.0f};
    if (grown) grow(factor);
    float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < C::kScores; ++i) {
      s[i] = exp2_approx(s[i]);
      part[i & 3] += s[i];
    }
    sum[0] += part[0] + part[1];
    sum[1] += part[2] + part[3];
    // Never true. Without it ptxas waits for the products before the exponentials.
    if (sum[0] + sum[1] < 0.0f) nanosleep();
    if (turns) give_turn();
    wgmma_wait<0>();
    if (pending) release(&smem.v_empty[pending_stage]);
#pragma unroll
    for (int i = 0; i < C::kScores / 2; ++i) pr[i] = pack2<T>(s[2 * i], s[2 * i + 1]);
    if (grown) {
#pragma unroll
      for (int g = 0; g < C::kOut / 4; ++g) {
        o[4 * g] *= factor[0];
        o[4 * g + 1] *= factor[0];
        o[4 * g + 2] *= factor[1];
        o[4 * g + 3] *= factor[1];
      }
    }
  }

  // Moves the bounds of the warp's rows above the differences in S, which follow, as do the sums.
  __device__ __forceinline__ void grow(float (&factor)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = s[2 * r];
#pragma unroll
      for (int g = 0; g < C::kGroups; ++g)
        top = fmaxf(top, fmaxf(s[4 * g + 2 * r], s[4 * g + 2 * r + 1]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      const u32 quad = 0xfu << (lane & ~3);
      const bool first = (__ballot_sync(~0u, sum[r] == 0.0f) & quad) == quad;
      const bool moves = top >= 0.0f || (first && top > negative_infinity());
      const float raised = moves ? ceilf(top + bound[r]) + C::kLag : bound[r];
      const float by = bound[r] - raised;
#pragma unroll
      for (int g = 0; g < C::kGroups; ++g) {
        s[4 * g + 2 * r] += by;
        s[4 * g + 2 * r + 1] += by;
      }
      factor[r] = first ? 1.0f : exp2_approx(by);
      sum[r] *= factor[r];
      bound[r] = raised;
    }
  }

  __device__ __forceinline__ void negate_q() {
    u32* words = reinterpret_cast<u32*>(smem.q + warpgroup * C::kQBytes);
    for (int i = warp * 32 + lane; i < C::kQBytes / 4; i += 128) words[i] ^= 0x80008000u;
    async_proxy_fence();
    named_barrier_sync(1 + warpgroup, 128);
  }

  __device__ __forceinline__ void finish(const Task& task, int warp_row) {
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
        if (row >= task.rows) continue;
        const i64 index = static_cast<i64>(task.slot) * C::kTileQ + row;
        float2* target = reinterpret_cast<float2*>(p.partial_o + index * C::kHeadDim);
#pragma unroll
        for (int g = 0; g < C::kOut / 4; ++g)
          target[g * 4 + (lane & 3)] = make_float2(o[4 * g + 2 * r], o[4 * g + 2 * r + 1]);
        if ((lane & 3) == 0)
          reinterpret_cast<float2*>(p.partial_ml)[index] =
              make_float2(sum[r] > 0.0f ? bound[r] : negative_infinity(), sum[r]);
      }
      return;
    }
    u16* out = static_cast<u16*>(p.o) + (task.head / p.q_heads) * p.o_stride.batch +
               (task.head % p.q_heads) * p.o_stride.head;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool exists = tile_row + 8 * r < task.rows;
      const i64 row = warp_row + (lane >> 2) + 8 * r;
      const float inverse = sum[r] > 0.0f ? 1.0f / sum[r] : 0.0f;
#pragma unroll
      for (int g = 0; g < C::kOut / 4; g += 4) {
        // Four lanes hold two columns of each of four 8-column groups: a transpose over them leaves
        // each with the 16 bytes of one group.
        u32 x[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
          x[j] = pack2<T>(o[4 * (g + j) + 2 * r] * inverse, o[4 * (g + j) + 2 * r + 1] * inverse);
        transpose(x);
        const int column = (g + (lane & 3)) * 8;
        if (exists && column < p.head_dim)
          *reinterpret_cast<uint4*>(out + row * p.o_stride.row + column) =
              make_uint4(x[0], x[1], x[2], x[3]);
      }
      if (p.lse != nullptr && (lane & 3) == 0 && exists) {
        p.lse[static_cast<i64>(task.head) * p.sq + row] =
            sum[r] > 0.0f ? (bound[r] + log2_approx(sum[r])) * 0.6931471805599453f
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

template <typename C>
__device__ __forceinline__ void attend_wgmma(const WgmmaParams& params) {
  extern __shared__ __align__(1024) u8 dynamic_smem[];
  WgmmaStorage<C>& smem = *reinterpret_cast<WgmmaStorage<C>*>(dynamic_smem);
  // V rows that no fragment fills are multiplied by zeros: they must be numbers.
  for (int i = threadIdx.x; i < C::kStages * C::kTileBytes / 16; i += C::kThreads)
    reinterpret_cast<uint4*>(smem.v)[i] = make_uint4(0, 0, 0, 0);
  for (int i = threadIdx.x; i < C::kStages * C::kTileBytes / 16; i += C::kThreads)
    reinterpret_cast<uint4*>(smem.k)[i] = make_uint4(0, 0, 0, 0);
  if (threadIdx.x == 0) {
    constexpr int kReleases = 4 * C::kWarpgroups;  // one a consumer warp
    for (int w = 0; w < C::kWarpgroups; ++w) {
      mbarrier_init(smem_address(&smem.q_full[w]), 1);
      mbarrier_init(smem_address(&smem.q_empty[w]), 4);
    }
    for (int stage = 0; stage < C::kStages; ++stage) {
      mbarrier_init(smem_address(&smem.k_full[stage]), 1);
      mbarrier_init(smem_address(&smem.v_full[stage]), 1);
      mbarrier_init(smem_address(&smem.k_empty[stage]), kReleases);
      mbarrier_init(smem_address(&smem.v_empty[stage]), kReleases);
    }
    mbarrier_init_fence();
  }
  async_proxy_fence();
  __syncthreads();
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32 % 4, 0);
  if (warpgroup == 0) {
    registers_decrease<C::kProducerRegisters>();
    if (warp == 0)
      copy_kv<C>(params, smem.k, smem.k_full, smem.k_empty, &params.k_rows, &params.k_fragment);
    if (warp == 1)
      copy_kv<C>(params, smem.v, smem.v_full, smem.v_empty, &params.v_rows, &params.v_fragment);
    if (warp == 2) copy_q<C>(params, smem);
  } else {
    registers_increase<C::kConsumerRegisters>();
    WgmmaConsumer<C> consumer{params, smem, warpgroup - 1, warp,
                              static_cast<int>(threadIdx.x) & 31};
    consumer.run();
  }
}

}  // namespace tessera

// The one entry of a specialisation: element type, head dim, tile rows, tile columns.
#define TESSERA_ATTEND_WGMMA(T, ...)                                              \
  extern "C" __global__ void __launch_bounds__(                                   \
      tessera::WgmmaConfig<tessera::T, __VA_ARGS__>::kThreads, 1)                 \
      attend(const __grid_constant__ tessera::WgmmaParams params) {               \
    tessera::attend_wgmma<tessera::WgmmaConfig<tessera::T, __VA_ARGS__>>(params); \
  }
