// The nearest centroid of each token, as in kmeans_assign.cu, with wgmma and the tensor copy
// engine, for Hopper (sm_90a) and rows of at most 128 elements:
//
//   label[t] = argmax_c  x[t] . c  -  |c|^2 / 2        ties to the lower c
//
// A CTA takes 192 tokens at a time and walks over the centroids, 128 at a time. Tokens of the next
// turn arrive meanwhile, so that the products go on. Per 192 tokens L2 gives all centroids once,
// 2.8 TB/s for all multiprocessors at the full matrix rate.
//
// Roles: three warpgroups multiply 64 tokens each; warp 12 copies. The warpgroups take turns at
// their comparisons: else their products, which share the tensor cores, would end together, and
// the tensor cores wait for the comparisons. A thread has 16 pairs of a tile's columns of two rows.
// It compares pairs, and which of a pair it was is asked at the end: 5 instructions in place of 6.
//
// Shared memory, in the 128-byte swizzle: tokens [2][64-column slab][192 rows][128 B], centroids
// [3][slab][128 rows][128 B], and 128 halves of squared norms a stage.
//
// Expected on an H200, a prediction, for 57,600 tokens x 8 heads x 128 and 1,000 centroids (1,024
// are multiplied): 121 GFLOP at 500 to 600 TFLOP/s, 0.20 to 0.24 ms; for 300 (384) 0.08 to 0.09.
// A tile's products take a multiprocessor 1,536 cycles, the comparisons of the three warpgroups,
// one after the other, about 1,100.
#pragma once

#include "common/finite.cuh"
#include "common/ptx.cuh"
#include "common/ptx_hopper.cuh"
#include "common/ring.cuh"
#include "common/types.cuh"

namespace tessera {

struct KmeansAssignWgmmaParams {
  TensorMap x;          // (element, token, head, 1), boxes of 64 x 192, of tokens to be labelled
  TensorMap centroids;  // (element, cluster, head, 1), boxes of 64 x 128
  const float* half_norms;  // (heads, clusters)
  i32* labels;              // (heads, x_tokens), from the first token to be labelled
  i32* flag;                // set where x holds NaN or infinities, or null
  i32 x_tokens;             // tokens from one head to the next
  i32 tokens;               // to be labelled
  i32 clusters;
  i32 tiles;  // ceil(tokens / 192)
  i32 items;  // tiles of all heads
  i32 slabs;  // of 64 elements a row: 1 or 2
};

struct NearestStorage {
  static constexpr int kWarpgroups = 3;  // that multiply
  static constexpr int kRows = 64 * kWarpgroups;
  static constexpr int kColumns = 128;
  static constexpr int kStages = 3;
  static constexpr int kRowsSlab = kRows * 128;  // bytes
  static constexpr int kColumnsSlab = kColumns * 128;

  alignas(1024) u8 x[2][2 * kRowsSlab];
  alignas(1024) u8 centroids[kStages][2 * kColumnsSlab];
  alignas(16) float half_norms[kStages][kColumns];
  alignas(8) u64 x_full[2];
  u64 x_empty[2];
  u64 full[kStages];
  u64 empty[kStages];
};

// The warp that copies.
__device__ __forceinline__ void copy_nearest(const KmeansAssignWgmmaParams& p, NearestStorage& s) {
  const int lane = threadIdx.x & 31;
  RingPlace<2> tokens;
  RingPlace<NearestStorage::kStages> tile;
  for (int item = blockIdx.x; item < p.items; item += gridDim.x) {
    const int head = item / p.tiles;
    mbarrier_wait(smem_address(&s.x_empty[tokens.stage]), tokens.phase ^ 1u);
    if (lane == 0) {
      const u32 barrier = smem_address(&s.x_full[tokens.stage]);
      mbarrier_arrive_expect(barrier, p.slabs * NearestStorage::kRowsSlab);
      for (int slab = 0; slab < p.slabs; ++slab)
        tma_load_4d(smem_address(s.x[tokens.stage]) + slab * NearestStorage::kRowsSlab, &p.x,
                    barrier, slab * 64, item % p.tiles * NearestStorage::kRows, head, 0);
    }
    __syncwarp();
    tokens.next();
    for (int from = 0; from < p.clusters; from += NearestStorage::kColumns) {
      const u32 barrier = smem_address(&s.full[tile.stage]);
      mbarrier_wait(smem_address(&s.empty[tile.stage]), tile.phase ^ 1u);
      if (lane == 0) {
        mbarrier_arrive_expect(barrier, p.slabs * NearestStorage::kColumnsSlab);
        for (int slab = 0; slab < p.slabs; ++slab)
          tma_load_4d(smem_address(s.centroids[tile.stage]) + slab * NearestStorage::kColumnsSlab,
                      &p.centroids, barrier, slab * 64, from, head, 0);
      }
      __syncwarp();
      // Columns without a centroid are below all others.
      const float* const half_norms = p.half_norms + static_cast<i64>(head) * p.clusters;
#pragma unroll
      for (int i = 0; i < NearestStorage::kColumns; i += 32) {
        const int c = from + i + lane;
        s.half_norms[tile.stage][i + lane] =
            c < p.clusters ? __ldg(half_norms + c) : -negative_infinity();
      }
      __syncwarp();
      // Of the lane that arrived already the others release what it wrote.
      if (lane != 0) mbarrier_arrive(barrier);
      __syncwarp();
      tile.next();
    }
  }
}

// A warpgroup that multiplies.
template <typename T, int kSlabs>
__device__ __forceinline__ void find_nearest(const KmeansAssignWgmmaParams& p, NearestStorage& s,
                                             int warpgroup) {
  using S = NearestStorage;
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5 & 3;
  auto take_turn = [warpgroup] { named_barrier_sync(1 + warpgroup, 256); };
  auto give_turn = [warpgroup] { named_barrier_arrive(1 + (warpgroup + 1) % S::kWarpgroups, 256); };
  if (warpgroup == S::kWarpgroups - 1) give_turn();

  RingPlace<2> tokens;
  RingPlace<S::kStages> tile;
  for (int item = blockIdx.x; item < p.items; item += gridDim.x) {
    mbarrier_wait(smem_address(&s.x_full[tokens.stage]), tokens.phase);
    const u8* const rows = s.x[tokens.stage] + warpgroup * 64 * 128;
    if (p.flag != nullptr) {
      bool found = false;
#pragma unroll 1
      for (int i = 0; i < kSlabs * 4; ++i) {
        const uint4 v = *reinterpret_cast<const uint4*>(rows + i / 4 * S::kRowsSlab +
                                                        (i % 4 * 128 + (threadIdx.x & 127)) * 16);
        found = found || not_finite<T>(v.x) || not_finite<T>(v.y) || not_finite<T>(v.z) ||
                not_finite<T>(v.w);
      }
      if (found) *p.flag = 1;
      __syncwarp();
    }
    const u32 a_low = descriptor_low(smem_address(rows), 16);

    // Of the rows lane / 4 and that plus 8: the best score, the pair of columns that has it, and
    // the score of the pair's even one.
    float best[2];
    float even[2];
    i32 label[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      best[i] = even[i] = negative_infinity();
      label[i] = 0;
    }
#pragma unroll 1
    for (int from = 0; from < p.clusters; from += S::kColumns) {
      mbarrier_wait(smem_address(&s.full[tile.stage]), tile.phase);
      const u32 b_low = descriptor_low(smem_address(s.centroids[tile.stage]), 16);
      float c[S::kColumns / 2];
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4 * kSlabs; ++k) {
        const u64 a = descriptor(a_low + (k / 4) * (S::kRowsSlab / 16) + (k % 4) * 2, 1024);
        const u64 b = descriptor(b_low + (k / 4) * (S::kColumnsSlab / 16) + (k % 4) * 2, 1024);
        if (k == 0) {
          wgmma_qk(T{}, c, a, b);
        } else {
          wgmma_qk_add(T{}, c, a, b);
        }
      }
      wgmma_commit();
      wgmma_wait<0>();
      take_turn();
      const int column = 2 * (lane & 3);
      const float2* const half_norms =
          reinterpret_cast<const float2*>(s.half_norms[tile.stage] + column);
      int pair[2] = {-1, -1};
#pragma unroll
      for (int j = 0; j < S::kColumns / 8; ++j) {
        const float2 half_norm = half_norms[4 * j];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float first = c[4 * j + 2 * i] - half_norm.x;
          const float larger = fmaxf(first, c[4 * j + 2 * i + 1] - half_norm.y);
          // Columns come in rising order, so the lower one of equals stays.
          if (larger > best[i]) {
            pair[i] = j;
            even[i] = first;
          }
          best[i] = fmaxf(best[i], larger);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (pair[i] >= 0) label[i] = from + column + 8 * pair[i];
      give_turn();
      __syncwarp();  // all lanes have read their halves of norms
      if (lane == 0) mbarrier_arrive(smem_address(&s.empty[tile.stage]));
      tile.next();
    }
    if (lane == 0) mbarrier_arrive(smem_address(&s.x_empty[tokens.stage]));
    __syncwarp();
    tokens.next();

    auto take = [](float& value, i32& index, float other, i32 other_index) {
      if (other > value || (other == value && other_index < index)) {
        value = other;
        index = other_index;
      }
    };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& value = best[half];
      i32& index = label[half];
      if (even[half] != value) ++index;
      // The four lanes of a row.
#pragma unroll
      for (int apart = 1; apart < 4; apart *= 2) {
        const float other = __shfl_xor_sync(~0u, value, apart);
        const i32 other_index = __shfl_xor_sync(~0u, index, apart);
        take(value, index, other, other_index);
      }
      const int row =
          item % p.tiles * S::kRows + warpgroup * 64 + warp * 16 + half * 8 + (lane >> 2);
      if ((lane & 3) == 0 && row < p.tokens)
        p.labels[static_cast<i64>(item / p.tiles) * p.x_tokens + row] = index;
    }
  }
  if (warpgroup == 0) take_turn();  // the one that nobody took
}

template <typename T, int kWarps>
__device__ __forceinline__ void kmeans_assign_wgmma(const KmeansAssignWgmmaParams& p) {
  using S = NearestStorage;
  static_assert(kWarps == 4 * S::kWarpgroups + 1, "three warpgroups and the warp that copies");
  extern __shared__ __align__(1024) u8 dynamic_smem[];
  S& s = *reinterpret_cast<S*>(dynamic_smem);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(smem_address(&s.x_full[i]), 1);
      mbarrier_init(smem_address(&s.x_empty[i]), 4 * S::kWarpgroups);
    }
    for (int i = 0; i < S::kStages; ++i) {
      mbarrier_init(smem_address(&s.full[i]), 32);
      mbarrier_init(smem_address(&s.empty[i]), 4 * S::kWarpgroups);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == S::kWarpgroups) {
    copy_nearest(p, s);
  } else if (p.slabs == 1) {
    find_nearest<T, 1>(p, s, warpgroup);
  } else {
    find_nearest<T, 2>(p, s, warpgroup);
  }
}

}  // namespace tessera

// The one entry of a specialisation.
#define TESSERA_KMEANS_ASSIGN_WGMMA(T, WARPS, MIN_CTAS)                                      \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)                         \
      kmeans_assign_wgmma(const __grid_constant__ tessera::KmeansAssignWgmmaParams params) { \
    tessera::kmeans_assign_wgmma<tessera::T, WARPS>(params);                                 \
  }
