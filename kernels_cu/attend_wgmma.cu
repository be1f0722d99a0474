// Block-sparse attention forward with wgmma and the tensor copy engine, for Hopper (sm_90a).
//
//   O[r] = sum_c P[r, c] V[c] / sum_c P[r, c],   P[r, c] = exp(scale * Q[r] . K[c])
//   over the key rows c that the tile's fragments list for row r; LSE[r] = ln sum_c P[r, c].
//
// A CTA takes tasks in turn: 128 query rows, KV steps of 128 columns filled from fragments of 8 to
// 128 rows that lie anywhere.
//
// Roles: warp 0 of warpgroup 0 copies; warpgroups 1 and 2 multiply 64 query rows each. A warpgroup
// that no row of is a member of a step skips it. K and V have two stages each, with a full and an
// empty barrier a stage.
//
// Shared memory: Q [warpgroup][64-column slab][64 rows][128 B] (the O tile on the way out); K and V
// stages [8-row group][slab][8 rows][128 B], so a fragment of any multiple of 8 rows is one run of
// bytes and descriptors have fixed strides. All in the 128-byte swizzle.
#pragma once

#include "common/ptx.cuh"
#include "common/ptx_hopper.cuh"
#include "common/types.cuh"

namespace tessera {

template <typename T_, int kHeadDim_>
struct WgmmaConfig {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kTileKV = 128;
  static constexpr int kStages = 2;
  static constexpr int kWarpgroups = 2;
  static constexpr int kTileQ = 64 * kWarpgroups;
  static constexpr int kThreads = 128 * (1 + kWarpgroups);
  static constexpr int kSlabs = kHeadDim / 64;
  static constexpr int kQBytes = 64 * kHeadDim * 2;  // of one warpgroup
  static constexpr int kTileBytes = kTileKV * kHeadDim * 2;
  static constexpr int kGroupBytes = 8 * kHeadDim * 2;
  static constexpr int kOut = kHeadDim / 2;  // O registers of a thread
  static constexpr int kGroups = kTileKV / 8;
  static constexpr float kLag = 8.0f;
  static_assert(kHeadDim == 64 || kHeadDim == 128, "one or two slabs of 64 columns");
};

template <typename C>
struct WgmmaStorage {
  alignas(1024) u8 q[C::kWarpgroups * C::kQBytes];
  alignas(1024) u8 k[C::kStages * C::kTileBytes];
  alignas(1024) u8 v[C::kStages * C::kTileBytes];
  alignas(8) u64 q_full;
  u64 q_empty;
  u64 k_full[C::kStages];
  u64 k_empty[C::kStages];
  u64 v_full[C::kStages];
  u64 v_empty[C::kStages];
};

// The producer warp: one task after the other, K one step ahead of V.
template <typename C>
__device__ __forceinline__ void wgmma_produce(const WgmmaParams& p, WgmmaStorage<C>& smem) {
  const int lane = threadIdx.x & 31;
  const int slot = 1 << p.slot_log2;
  const int fragments = C::kTileKV >> p.slot_log2;
  const u32 fragment_bytes = slot * C::kHeadDim * 2;
  int step_count = 0;
  u32 q_phase = 1;

  for (int t = blockIdx.x; t < p.task_count; t += gridDim.x) {
    const Task task = p.tasks[t];
    const int batch = task.head / p.q_heads;
    const int head = task.head % p.q_heads;
    const int kv_head = head / p.q_per_kv;
    const int kv_heads = p.q_heads / p.q_per_kv;
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
    auto copy = [&](const Fragment& f, u8* tile, u64* full, const TensorMap* rows,
                    const TensorMap* whole) {
      const int length = f.info >> 24;
      const bool loaded = length > 0 && (f.info & 0xffffffu) != 0;
      const u32 bytes = __popc(__ballot_sync(~0u, loaded)) * fragment_bytes;
      const u32 barrier = smem_address(full);
      if (lane == 0) mbarrier_arrive_expect(barrier, bytes);
      __syncwarp();
      if (loaded) {
        const u32 target = smem_address(tile) + lane * fragment_bytes;
        if (length == slot && (f.start & 7) == 0 && f.start + slot <= p.whole_rows) {
          tma_load_5d(target, whole, barrier, f.start >> 3, batch * kv_heads + kv_head);
        } else {
          for (int g = 0; g < slot / 8; ++g)
            for (int slab = 0; slab < C::kSlabs; ++slab)
              tma_load_4d(target + (g * C::kSlabs + slab) * 1024, rows, barrier, slab * 64,
                          f.start + g * 8, kv_head, batch);
        }
      }
      __syncwarp();
    };

    Fragment current = fetch(0);
    Fragment previous = current;
    for (int i = 0; i <= steps; ++i) {
      if (i < steps) {
        const int stage = (step_count + i) % C::kStages;
        const u32 phase = ((step_count + i) / C::kStages) & 1;
        mbarrier_wait(smem_address(&smem.k_empty[stage]), phase ^ 1);
        copy(current, smem.k + stage * C::kTileBytes, &smem.k_full[stage], &p.k_rows,
             &p.k_fragment);
      }
      if (i == 0) {
        mbarrier_wait(smem_address(&smem.q_empty), q_phase);
        q_phase ^= 1;
        const u32 barrier = smem_address(&smem.q_full);
        if (lane == 0) {
          mbarrier_arrive_expect(barrier, C::kWarpgroups * C::kQBytes);
          for (int w = 0; w < C::kWarpgroups; ++w)
            for (int slab = 0; slab < C::kSlabs; ++slab)
              tma_load_4d(smem_address(smem.q) + w * C::kQBytes + slab * 8192, &p.q, barrier,
                          slab * 64, task.first_row + w * 64, head, batch);
        }
        __syncwarp();
      }
      const Fragment following = fetch(i + 1);
      if (i > 0) {
        const int stage = (step_count + i - 1) % C::kStages;
        const u32 phase = ((step_count + i - 1) / C::kStages) & 1;
        mbarrier_wait(smem_address(&smem.v_empty[stage]), phase ^ 1);
        copy(previous, smem.v + stage * C::kTileBytes, &smem.v_full[stage], &p.v_rows,
             &p.v_fragment);
      }
      previous = current;
      current = following;
    }
    step_count += steps;
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
  float s[64];
  u32 pr[32];
  float reference[2];
  float sum[2];
  u32 q_low;
  u32 k_low;
  u32 v_low;

  __device__ __forceinline__ void release(u64* barrier) const {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(smem_address(barrier));
  }

  // Valid columns << 24 | members of this lane's 8 columns in the i-th step of the task.
  __device__ __forceinline__ u32 fetch(const Task& task, int i) const {
    if (i >= task.end - task.begin || lane >= C::kGroups) return 0u;
    const int step = task.reverse ? task.end - 1 - i : task.begin + i;
    const int index = step * (C::kTileKV >> p.slot_log2) + ((lane * 8) >> p.slot_log2);
    if (index >= task.frag_count) return 0u;
    const u32 info = __ldg(&p.frags[task.frag_begin + index].info);
    const int length = info >> 24;
    const int valid = min(max(length - ((lane * 8) & ((1 << p.slot_log2) - 1)), 0), 8);
    return (static_cast<u32>(valid) << 24) | (info & 0xffffffu);
  }

  __device__ __forceinline__ void start_qk(int stage, bool masked) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < C::kHeadDim / 16; ++k) {
      const u64 a = descriptor(q_low + (k / 4) * 512 + (k % 4) * 2, 1024);
      const u64 b = descriptor(k_low + stage * (C::kTileBytes / 16) + (k / 4) * 64 + (k % 4) * 2,
                               C::kGroupBytes);
      if (k == 0) {
        wgmma_qk<T>(s, a, b, masked);
      } else {
        wgmma_qk_add<T>(s, a, b);
      }
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void start_pv(int stage) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < C::kTileKV / 16; ++k) {
      const u64 b = descriptor(v_low + stage * (C::kTileBytes / 16) + k * (2 * C::kGroupBytes / 16),
                               C::kGroupBytes);
      wgmma_pv<T>(o, pr + 4 * k, b);
    }
    wgmma_commit();
  }

  // Scores of pairs that are off start from -inf, the others from 0. Lane g has the word of column
  // group g.
  __device__ __forceinline__ void mask(u32 words) {
    const int column = (lane & 3) * 2;
#pragma unroll
    for (int g = 0; g < C::kGroups; ++g) {
      const u32 word = __shfl_sync(~0u, words, g);
      const int valid = word >> 24;
      const u32 members = word >> (warpgroup * 8 + warp * 2);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool on = ((members >> (e >> 1)) & 1u) && column + (e & 1) < valid;
        s[4 * g + e] = on ? 0.0f : negative_infinity();
      }
    }
  }

  __device__ __forceinline__ void run() {
    q_low = descriptor_low(smem_address(smem.q) + warpgroup * C::kQBytes, 16);
    k_low = descriptor_low(smem_address(smem.k), 16);
    v_low = descriptor_low(smem_address(smem.v), 1024);
    int step_count = 0;
    u32 q_phase = 0;
    for (int t = blockIdx.x; t < p.task_count; t += gridDim.x) {
      const Task task = p.tasks[t];
      const int steps = task.end - task.begin;
      // Membership bits of this warpgroup's rows that exist.
      const int own_rows = min(max(task.rows - warpgroup * 64, 0), 64);
      const u32 existing = (1u << ((own_rows + 7) / 8)) - 1u;
      reference[0] = reference[1] = negative_infinity();
      sum[0] = sum[1] = 0.0f;
#pragma unroll
      for (int i = 0; i < C::kOut; ++i) o[i] = 0.0f;
      mbarrier_wait(smem_address(&smem.q_full), q_phase);
      q_phase ^= 1;
      if (p.negate) negate_q();

      u32 following = fetch(task, 0);
      bool pending = false;  // P of the step before waits for its V
      for (int i = 0; i < steps; ++i) {
        const int n = step_count + i;
        const int stage = stage_of(n);
        const u32 phase = phase_of(n);
        mbarrier_wait(smem_address(&smem.k_full[stage]), phase);
        // Uniform over the warpgroup, as wgmma is: its rows' part in the step.
        const u32 word = following;
        following = fetch(task, i + 1);
        const u32 members = (word >> (warpgroup * 8)) & existing;
        const u32 valid = word >> 24;
        const bool any = __any_sync(~0u, valid != 0u && members != 0u);
        const bool full =
            __all_sync(~0u, lane >= C::kGroups || (members == existing && valid == 8u));
        if (!any) {
          if (pending) {
            finish_pv(n - 1);
            pending = false;
          }
          release(&smem.k_empty[stage]);
          mbarrier_wait(smem_address(&smem.v_full[stage]), phase);
          release(&smem.v_empty[stage]);
          continue;
        }
        if (!full) mask(word);
        start_qk(stage, !full);
        if (pending) {
          mbarrier_wait(smem_address(&smem.v_full[stage_of(n - 1)]), phase_of(n - 1));
          start_pv(stage_of(n - 1));
          wgmma_wait<1>();
        } else {
          wgmma_wait<0>();
        }
        release(&smem.k_empty[stage]);
        softmax(pending, stage_of(n - 1));
        pending = true;
      }
      if (pending) finish_pv(step_count + steps - 1);
      step_count += steps;
      finish(task);
    }
  }

  static __device__ __forceinline__ int stage_of(int n) { return n % C::kStages; }
  static __device__ __forceinline__ u32 phase_of(int n) { return (n / C::kStages) & 1; }

  __device__ __forceinline__ void finish_pv(int n) {
    const int stage = stage_of(n);
    mbarrier_wait(smem_address(&smem.v_full[stage]), phase_of(n));
    start_pv(stage);
    wgmma_wait<0>();
    release(&smem.v_empty[stage]);
  }

  __device__ __forceinline__ void softmax(bool pending, int pending_stage) {
    float top[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float m[4] = {s[2 * r], s[2 * r + 1], s[4 + 2 * r], s[4 + 2 * r + 1]};
#pragma unroll
      for (int g = 2; g < C::kGroups; g += 2) {
        m[0] = fmaxf(m[0], s[4 * g + 2 * r]);
        m[1] = fmaxf(m[1], s[4 * g + 2 * r + 1]);
        m[2] = fmaxf(m[2], s[4 * g + 4 + 2 * r]);
        m[3] = fmaxf(m[3], s[4 * g + 4 + 2 * r + 1]);
      }
      top[r] = fmaxf(fmaxf(m[0], m[1]), fmaxf(m[2], m[3])) * p.scale_log2;
    }
    const bool grown =
        __any_sync(~0u, top[0] > reference[0] + C::kLag || top[1] > reference[1] + C::kLag);
    float factor[2] = {1.0f, 1.0f};
    if (grown) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
        top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2));
        top[r] = fmaxf(ceilf(top[r]), reference[r]);
        factor[r] = top[r] == reference[r] ? 1.0f : exp2_approx(reference[r] - top[r]);
        reference[r] = top[r];
        sum[r] *= factor[r];
      }
    }
    const float shift[2] = {-fmaxf(reference[0], -1e30f), -fmaxf(reference[1], -1e30f)};
    float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int g = 0; g < C::kGroups; ++g) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        s[4 * g + e] = exp2_approx(fmaf(s[4 * g + e], p.scale_log2, shift[e >> 1]));
        part[e] += s[4 * g + e];
      }
    }
    sum[0] += part[0] + part[1];
    sum[1] += part[2] + part[3];
    // Never true. Without it ptxas waits for PV before the exponentials.
    if (sum[0] + sum[1] < 0.0f) nanosleep();
    wgmma_wait<0>();
    if (pending) release(&smem.v_empty[pending_stage]);
#pragma unroll
    for (int g = 0; g < C::kGroups; ++g) {
      pr[2 * g] = pack2<T>(s[4 * g], s[4 * g + 1]);
      pr[2 * g + 1] = pack2<T>(s[4 * g + 2], s[4 * g + 3]);
    }
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

  __device__ __forceinline__ void negate_q() {
    u32* words = reinterpret_cast<u32*>(smem.q + warpgroup * C::kQBytes);
    for (int i = warp * 32 + lane; i < C::kQBytes / 4; i += 128) words[i] ^= 0x80008000u;
    async_proxy_fence();
    named_barrier_sync(1 + warpgroup, 128);
  }

  __device__ __forceinline__ void finish(const Task& task) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
      sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
    }
    const int row0 = warpgroup * 64 + warp * 16 + (lane >> 2);
    if (task.slot >= 0) {
      release(&smem.q_empty);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = row0 + 8 * r;
        if (row >= task.rows) continue;
        const i64 index = static_cast<i64>(task.slot) * C::kTileQ + row;
        float2* target = reinterpret_cast<float2*>(p.partial_o + index * C::kHeadDim);
#pragma unroll
        for (int g = 0; g < C::kOut / 4; ++g)
          target[g * 4 + (lane & 3)] = make_float2(o[4 * g + 2 * r], o[4 * g + 2 * r + 1]);
        if ((lane & 3) == 0)
          reinterpret_cast<float2*>(p.partial_ml)[index] = make_float2(reference[r], sum[r]);
      }
      return;
    }
    // All four warps are done with Q; each stages its own 16 rows there.
    named_barrier_sync(1 + warpgroup, 128);
    u8* staged = smem.q + warpgroup * C::kQBytes;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int local = warp * 16 + 8 * r + (lane >> 2);
      const float inverse = sum[r] > 0.0f ? 1.0f / sum[r] : 0.0f;
#pragma unroll
      for (int g = 0; g < C::kOut / 4; ++g) {
        const int chunk = (g & 7) ^ (local & 7);
        *reinterpret_cast<u32*>(staged + (g >> 3) * 8192 + local * 128 + chunk * 16 +
                                (lane & 3) * 4) =
            pack2<T>(o[4 * g + 2 * r] * inverse, o[4 * g + 2 * r + 1] * inverse);
      }
      const int row = row0 + 8 * r;
      if (p.lse != nullptr && (lane & 3) == 0 && row < task.rows) {
        p.lse[static_cast<i64>(task.head) * p.sq + task.first_row + row] =
            sum[r] > 0.0f ? (reference[r] + log2_approx(sum[r])) * 0.6931471805599453f
                          : negative_infinity();
      }
    }
    __syncwarp();
    u16* out = static_cast<u16*>(p.o) + (task.head / p.q_heads) * p.o_stride.batch +
               (task.head % p.q_heads) * p.o_stride.head + task.first_row * p.o_stride.row;
    constexpr int kChunks = C::kHeadDim / 8;
#pragma unroll 4
    for (int index = lane; index < 16 * kChunks; index += 32) {
      const int local = warp * 16 + index / kChunks;
      const int chunk = index % kChunks;
      const int row = warpgroup * 64 + local;
      if (row < task.rows && chunk * 8 < p.head_dim) {
        const uint4 data = *reinterpret_cast<const uint4*>(
            staged + (chunk >> 3) * 8192 + local * 128 + (((chunk & 7) ^ (local & 7)) << 4));
        *reinterpret_cast<uint4*>(out + row * p.o_stride.row + chunk * 8) = data;
      }
    }
    // The next Q comes through the async proxy, after these reads and writes.
    async_proxy_fence();
    release(&smem.q_empty);
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
    mbarrier_init(smem_address(&smem.q_full), 1);
    mbarrier_init(smem_address(&smem.q_empty), kReleases);
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
    registers_decrease<24>();
    if (warp == 0) wgmma_produce<C>(params, smem);
  } else {
    registers_increase<240>();
    WgmmaConsumer<C> consumer{params, smem, warpgroup - 1, warp,
                              static_cast<int>(threadIdx.x) & 31};
    consumer.run();
  }
}

}  // namespace tessera

// The one entry of a specialisation.
#define TESSERA_ATTEND_WGMMA(T, HEAD_DIM)                                      \
  extern "C" __global__ void __launch_bounds__(384, 1)                         \
      attend(const __grid_constant__ tessera::WgmmaParams params) {            \
    tessera::attend_wgmma<tessera::WgmmaConfig<tessera::T, HEAD_DIM>>(params); \
  }
