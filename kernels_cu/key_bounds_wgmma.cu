// Upper bounds of the scores of each key with the queries of each group by the balls around the
// groups' means, as in key_bounds.cu, with wgmma and the tensor copy engine, for Hopper (sm_90a)
// and rows of at most 128 elements:
//
//   out[g, j] = scale * max over the parts p of g of  (centre[p] . k[j] + radius[p] |k[j]|)
//
// as float16. Keys that do not compete are NaN. Products are summed in float32 in the order of
// wgmma; the rest is rounded step by step as there.
//
// A step is 192 parts by 128 keys. A team of CTAs multiplies the same keys at about the same time,
// each with parts of its own, so that keys come from memory once for all of a team. Teams take
// equal pieces of the line of all planes' keys, so a CTA's parts stay in shared memory while keys
// pass, and change once or twice. Where there are more parts than a team has, keys pass once more
// for each band of them. Warpgroups whose 64 parts are all behind the last one multiply nothing.
//
// Roles: three warpgroups multiply 64 parts each, and what follows a product of one goes on beside
// the others' products; warp 12 copies. A thread has 16 pairs of neighbouring keys of two parts.
// The four lanes of a row exchange pairs so that each has 16 bytes of it, and a warp's store is 64
// bytes of eight rows, two of which one after the other are whole lines. The parts of a group are
// in the same column of lanes 4 and 8 apart.
//
// Shared memory, in the 128-byte swizzle: parts [64-column slab][192 rows][128 B], 48 KB; keys
// [4][slab][128 rows][128 B], 128 KB, and 128 lengths a stage.
//
// Expected on an H200, a prediction, for 900 groups x 57,600 keys x 8 heads x d 128: 26 teams of 5,
// 139 steps a CTA. 830 MB of bounds and 118 MB of keys at 3.5 to 3.8 TB/s are 0.25 to 0.27 ms,
// 3,200 cycles a step, in which a warpgroup multiplies in 512 to 1,536 and writes in 900 to 1,300;
// keys from L2 0.6 GB. In all 0.25 to 0.29 ms. With keys innermost and each CTA elsewhere, and
// turns at what follows a product, 0.40 were measured: keys came from memory five times.
#pragma once

#include "common/ptx.cuh"
#include "common/ptx_hopper.cuh"
#include "common/ring.cuh"
#include "common/types.cuh"

namespace tessera {

struct KeyBoundsWgmmaParams {
  TensorMap centres;     // (element, part, plane, 1), boxes of 64 x 192
  TensorMap keys;        // (element, token, plane, 1), boxes of 64 x 128
  const float* radii;    // (planes, rows)
  const float* lengths;  // (planes, tokens)
  u16* out;              // (planes, groups, pitch)
  i32 rows;              // parts of a plane
  i32 groups;            // of a plane, ceil(rows / parts)
  i32 parts;             // of a group: 1, 2 or 4
  i32 tokens;
  i32 pitch;  // 128 column_tiles
  i32 begin;  // keys from here to `end` compete
  i32 end;
  i32 planes;
  i32 team;          // CTAs that multiply the same keys, 192 parts each
  i32 column_tiles;  // of 128
  i32 steps;         // of all teams: bands x planes x column_tiles
  i32 slabs;         // of 64 elements a row: 1 or 2
  float scale;
};

struct KeyBoundsStorage {
  static constexpr int kWarpgroups = 3;  // that multiply
  static constexpr int kRows = 64 * kWarpgroups;
  static constexpr int kColumns = 128;
  static constexpr int kStages = 4;
  static constexpr int kRowsSlab = kRows * 128;  // bytes
  static constexpr int kColumnsSlab = kColumns * 128;

  alignas(1024) u8 centres[2 * kRowsSlab];
  alignas(1024) u8 keys[kStages][2 * kColumnsSlab];
  alignas(16) float lengths[kStages][kColumns];
  alignas(8) u64 centres_full;
  u64 centres_empty;
  u64 full[kStages];
  u64 empty[kStages];
};

// The CTA's steps, as far as they have the same parts.
struct BoundsPiece {
  int step;  // the first one of the piece
  int stop;  // the first one that is not in it
  int last;  // the first one of the next team
  int plane;
  int first_row;
  int column;  // of the first step

  __device__ __forceinline__ explicit BoundsPiece(const KeyBoundsWgmmaParams& p)
      : stop(edge(p, blockIdx.x / p.team)), last(edge(p, blockIdx.x / p.team + 1)) {
    next(p);
  }
  __device__ __forceinline__ bool valid() const { return step < last; }
  __device__ __forceinline__ void next(const KeyBoundsWgmmaParams& p) {
    step = stop;
    const int item = step / p.column_tiles;
    const int band = item / p.planes;
    plane = item - band * p.planes;
    first_row = (band * p.team + blockIdx.x % p.team) * KeyBoundsStorage::kRows;
    column = step - item * p.column_tiles;
    stop = min(last, (item + 1) * p.column_tiles);
  }

 private:
  static __device__ __forceinline__ int edge(const KeyBoundsWgmmaParams& p, u32 team) {
    const u32 teams = gridDim.x / p.team;
    return static_cast<int>(static_cast<u64>(team) * static_cast<u32>(p.steps) / teams);
  }
};

// The warp that copies.
__device__ __forceinline__ void copy_bounds(const KeyBoundsWgmmaParams& p, KeyBoundsStorage& s) {
  using S = KeyBoundsStorage;
  const int lane = threadIdx.x & 31;
  RingPlace<1> rows;
  RingPlace<S::kStages> tile;
  for (BoundsPiece piece(p); piece.valid(); piece.next(p)) {
    mbarrier_wait(smem_address(&s.centres_empty), rows.phase ^ 1u);
    if (lane == 0) {
      const u32 barrier = smem_address(&s.centres_full);
      mbarrier_arrive_expect(barrier, p.slabs * S::kRowsSlab);
      for (int slab = 0; slab < p.slabs; ++slab)
        tma_load_4d(smem_address(s.centres) + slab * S::kRowsSlab, &p.centres, barrier, slab * 64,
                    piece.first_row, piece.plane, 0);
    }
    __syncwarp();
    rows.next();
    const float* const lengths = p.lengths + static_cast<i64>(piece.plane) * p.tokens;
    int from = piece.column * S::kColumns;
    for (int step = piece.step; step < piece.stop; ++step, from += S::kColumns) {
      const u32 barrier = smem_address(&s.full[tile.stage]);
      mbarrier_wait(smem_address(&s.empty[tile.stage]), tile.phase ^ 1u);
      if (lane == 0) {
        mbarrier_expect(barrier, p.slabs * S::kColumnsSlab);
        for (int slab = 0; slab < p.slabs; ++slab)
          tma_load_4d(smem_address(s.keys[tile.stage]) + slab * S::kColumnsSlab, &p.keys, barrier,
                      slab * 64, from, piece.plane, 0);
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < S::kColumns; i += 32) {
        const int key = from + i + lane;
        s.lengths[tile.stage][i + lane] =
            key >= p.begin && key < p.end ? __ldg(lengths + key) : __uint_as_float(0x7fffffffu);
      }
      mbarrier_arrive(barrier);  // each lane releases what it wrote
      __syncwarp();
      tile.next();
    }
  }
}

// Of the four lanes of a row, which have pair l of four rows of pairs each, lane l gets row l.
__device__ __forceinline__ uint4 transposed(const u32 (&own)[4], int lane) {
  const bool odd = lane & 1;
  const bool upper = lane & 2;
  const u32 first = __shfl_xor_sync(~0u, odd ? own[0] : own[1], 1);
  const u32 second = __shfl_xor_sync(~0u, odd ? own[2] : own[3], 1);
  const u32 half[4] = {odd ? first : own[0], odd ? own[1] : first, odd ? second : own[2],
                       odd ? own[3] : second};
  const u32 third = __shfl_xor_sync(~0u, upper ? half[0] : half[2], 2);
  const u32 fourth = __shfl_xor_sync(~0u, upper ? half[1] : half[3], 2);
  return make_uint4(upper ? third : half[0], upper ? fourth : half[1], upper ? half[2] : third,
                    upper ? half[3] : fourth);
}

// A warpgroup that multiplies. Without `kParts` a group is one part.
template <typename T, int kSlabs, bool kParts>
__device__ __forceinline__ void multiply_bounds(const KeyBoundsWgmmaParams& p, KeyBoundsStorage& s,
                                                int warpgroup) {
  using S = KeyBoundsStorage;
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5 & 3;
  const int quad_lane = lane & 3;

  const u32 a_low = descriptor_low(smem_address(s.centres + warpgroup * 64 * 128), 16);
  RingPlace<1> rows;
  RingPlace<S::kStages> tile;
  for (BoundsPiece piece(p); piece.valid(); piece.next(p)) {
    // Of the rows lane / 4 and that plus 8.
    const bool some = piece.first_row + warpgroup * 64 < p.rows;
    float radius[2];
    u16* out[2];  // null: another lane, or nobody, writes it
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = piece.first_row + warpgroup * 64 + warp * 16 + 8 * i + (lane >> 2);
      const int group = kParts ? row / static_cast<u32>(p.parts) : row;
      // Parts that are not there are never the largest.
      radius[i] = row < p.rows ? __ldg(p.radii + static_cast<i64>(piece.plane) * p.rows + row)
                               : negative_infinity();
      out[i] = group < p.groups && (!kParts || row == group * p.parts)
                   ? p.out + (static_cast<i64>(piece.plane) * p.groups + group) * p.pitch +
                         piece.column * S::kColumns + 8 * quad_lane
                   : nullptr;
    }
    mbarrier_wait(smem_address(&s.centres_full), rows.phase);
#pragma unroll 1
    for (int step = piece.step; step < piece.stop; ++step) {
      mbarrier_wait(smem_address(&s.full[tile.stage]), tile.phase);
      float c[S::kColumns / 2];
      if (some) {
        const u32 b_low = descriptor_low(smem_address(s.keys[tile.stage]), 16);
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
      }
      if (some) {
        const float2* const lengths =
            reinterpret_cast<const float2*>(s.lengths[tile.stage] + 2 * quad_lane);
        // 32 keys at a time.
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter) {
          u32 pairs[2][4];
#pragma unroll
          for (int q = 0; q < 4; ++q) {
            const int j = 4 * quarter + q;
            const float2 length = lengths[4 * j];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              // Rounded one by one, as NumPy does.
              auto bound = [&](float along, float of_key) {
                return __fmul_rn(__fadd_rn(along, __fmul_rn(radius[i], of_key)), p.scale);
              };
              pairs[i][q] = pack2<half_t>(bound(c[4 * j + 2 * i], length.x),
                                          bound(c[4 * j + 2 * i + 1], length.y));
            }
          }
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if constexpr (kParts) {
              for (int apart = 4; apart < 4 * p.parts; apart *= 2) {
#pragma unroll
                for (int q = 0; q < 4; ++q)
                  pairs[i][q] = max2<half_t>(pairs[i][q], __shfl_xor_sync(~0u, pairs[i][q], apart));
              }
            }
            const uint4 line = transposed(pairs[i], lane);
            if (out[i] != nullptr) *reinterpret_cast<uint4*>(out[i] + 32 * quarter) = line;
          }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (out[i] != nullptr) out[i] += S::kColumns;
      }
      __syncwarp();  // all lanes have read their lengths
      if (lane == 0) mbarrier_arrive(smem_address(&s.empty[tile.stage]));
      tile.next();
    }
    if (lane == 0) mbarrier_arrive(smem_address(&s.centres_empty));
    __syncwarp();
    rows.next();
  }
}

template <typename T, int kWarps>
__device__ __forceinline__ void key_bounds_wgmma(const KeyBoundsWgmmaParams& p) {
  using S = KeyBoundsStorage;
  static_assert(kWarps == 4 * S::kWarpgroups + 1, "three warpgroups and the warp that copies");
  extern __shared__ __align__(1024) u8 dynamic_smem[];
  S& s = *reinterpret_cast<S*>(dynamic_smem);
  if (threadIdx.x == 0) {
    mbarrier_init(smem_address(&s.centres_full), 1);
    mbarrier_init(smem_address(&s.centres_empty), 4 * S::kWarpgroups);
    for (int i = 0; i < S::kStages; ++i) {
      mbarrier_init(smem_address(&s.full[i]), 32);
      mbarrier_init(smem_address(&s.empty[i]), 4 * S::kWarpgroups);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  if (warpgroup == S::kWarpgroups) {
    copy_bounds(p, s);
  } else if (p.slabs == 1) {
    if (p.parts == 1) {
      multiply_bounds<T, 1, false>(p, s, warpgroup);
    } else {
      multiply_bounds<T, 1, true>(p, s, warpgroup);
    }
  } else if (p.parts == 1) {
    multiply_bounds<T, 2, false>(p, s, warpgroup);
  } else {
    multiply_bounds<T, 2, true>(p, s, warpgroup);
  }
}

}  // namespace tessera

// The one entry of a specialisation.
#define TESSERA_KEY_BOUNDS_WGMMA(T, WARPS, MIN_CTAS)                                   \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)                   \
      key_bounds_wgmma(const __grid_constant__ tessera::KeyBoundsWgmmaParams params) { \
    tessera::key_bounds_wgmma<tessera::T, WARPS>(params);                              \
  }
