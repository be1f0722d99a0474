// What each key gets of the attention of a group of 192 queries, in an order of the tokens:
//
//   out[g, j] = sum over the queries i of group g of  exp(q_i . k_j / sqrt(d) - lse[i])
//
// as float16, at most the largest one, and NaN where q, k or a given lse of the group hold no
// numbers. Without an lse a first walk over all keys makes that of dense attention.
//
// A CTA takes a group and walks over the keys, 64 at a time (32 where rows have more than 128
// elements), which arrive by cp.async one step ahead, from the places that the order names.
//
// Roles: four warps of 48 queries each, in registers from the beginning on; channels from 128 on
// lie in shared memory as the lanes that use them have them. A fragment of keys that is read feeds
// three products. In the first walk each thread has a maximum and a sum of its own for each of its
// six rows, so that nothing is exchanged before the end. In the second, sums over a thread's rows
// meet those of other lanes by shuffles, and of other warps in shared memory one step later, always
// in one order: the same input gives the same bits.
//
// Shared memory: two stages of keys, rows of 16-byte chunks XOR-swizzled by row, 32 KB; sums of the
// warps, places of keys; 48 KB of queries where d is above 128.
//
// Expected on an H200, a prediction, for 57,600 tokens x 8 heads x d 128: a walk is 6.8 TFLOP, at
// 330 to 420 TFLOP/s of mma.sync 16 to 21 ms, beside which the exponentials take half as long
// (16 a cycle and multiprocessor) and keys from L2 6 ms; two walks 33 to 42 ms. NOTES.md has more.
#pragma once

#include "common/finite.cuh"
#include "common/ptx.cuh"
#include "common/types.cuh"

namespace tessera {

struct ColumnSumsParams {
  const void* q;     // (planes, tokens, 8 chunks) of T
  const void* k;     // the same
  const i32* order;  // (tokens): the token at each place
  const float* lse;  // (planes, tokens), natural logarithms, or null
  u16* out;          // (planes, groups, pitch), in the order
  i32* q_flag;       // set where q holds NaN or infinities, or null
  i32* k_flag;
  i32* lse_flag;
  i32 tokens;
  i32 groups;        // of a plane, ceil(tokens / 192)
  i32 pitch;         // a multiple of 64 that holds the tokens; what is behind them says nothing
  i32 chunks;        // 16-byte chunks of a row, at most 32
  float scale_log2;  // log2(e) / sqrt(d)
};

struct ColumnSumsStorage {
  static constexpr int kWarps = 4;
  static constexpr int kRowTiles = 3;  // of 16 rows, a warp's
  static constexpr int kRows = 16 * kRowTiles * kWarps;
  static constexpr int kMostKeys = 64;
  static constexpr int kStageBytes = 16 * 1024;
  static constexpr int kHeld = 8;  // steps of 16 channels in registers

  alignas(1024) u8 keys[2][kStageBytes];
  float sums[2][kWarps][kMostKeys];
  i32 places[2][kMostKeys];
  alignas(16) i32 bad;  // something of the group is no number
  // Steps past kHeld, of rows that have them.
  alignas(16) uint4 q[kWarps][kRowTiles][kHeld][32];
};

// kSteps: of 16 channels.
template <typename T, int kSteps>
class ColumnSums {
 public:
  __device__ __forceinline__ ColumnSums(const ColumnSumsParams& params, ColumnSumsStorage& storage)
      : p(params),
        s(storage),
        plane(blockIdx.x / static_cast<u32>(params.groups)),
        first(static_cast<int>(blockIdx.x % static_cast<u32>(params.groups)) * S::kRows),
        tiles((params.tokens + kKeys - 1) / kKeys) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) s.bad = 0;
    __syncthreads();
    const int walks = p.lse == nullptr ? 2 : 1;
    steps = walks * tiles;
    copy_places(0);
    cp_async_commit();
    copy_places(1);
    read_queries();
    look_at_keys();
    cp_async_wait<0>();
    __syncthreads();
    copy_keys(0);
    cp_async_commit();
    int step = 0;
    if (walks == 2) {
      for (; step < tiles; ++step) {
        arrive(step);
        multiply(step, [&](int part, Products& c) {
          if (step == tiles - 1) leave_out(part, c);
          add_to_rows(c);
        });
      }
      finish_rows();
    }
    const int begin = step;
    for (; step < steps; ++step) {
      arrive(step);
      if (step > begin) put(step - 1);
      multiply(step, [&](int part, Products& c) { add_to_columns(step, part, c); });
    }
    __syncthreads();
    put(step - 1);
  }

 private:
  using S = ColumnSumsStorage;
  static constexpr int kThreads = 32 * S::kWarps;
  static constexpr int kChunks = 2 * kSteps;
  static constexpr int kRowBytes = 16 * kChunks;
  static constexpr int kKeys = kSteps <= S::kHeld ? S::kMostKeys : S::kMostKeys / 2;
  static constexpr int kHeld = kSteps < S::kHeld ? kSteps : S::kHeld;
  static constexpr int kRows = 2 * S::kRowTiles;  // of a thread
  // Keys whose scores are there at a time.
  static constexpr int kPart = kSteps <= S::kHeld ? 32 : 16;
  static constexpr int kPartTiles = kPart / 8;
  // The reference of a row with nothing yet. Finite, so that a difference with it is never NaN.
  static constexpr float kNothing = -1e30f;
  static constexpr float kLog2E = 1.4426950408889634f;
  static constexpr float kMost = 65504.0f;  // of float16

  static_assert(kKeys * kRowBytes <= S::kStageBytes, "a stage holds a step's keys");
  static_assert(kKeys * kChunks % kThreads == 0, "copies have no remainder");

  // The thread's scores with a part, as mma.m16n8k16 has them.
  using Products = float[S::kRowTiles][kPartTiles][4];

  static __device__ __forceinline__ int lane() { return threadIdx.x & 31; }
  static __device__ __forceinline__ int warp() { return threadIdx.x >> 5; }

  // Byte offset of a chunk. Eight rows at one chunk fall into eight different bank groups.
  static __device__ __forceinline__ int swizzled(int row, int chunk) {
    return row * kRowBytes + ((chunk ^ (row & 7)) << 4);
  }

  __device__ __forceinline__ int tile_of(int step) const {
    return step < tiles ? step : step - tiles;
  }

  // The token of a place of the group, or -1.
  __device__ __forceinline__ int token_of(int row) const {
    return first + row < p.tokens ? __ldg(p.order + first + row) : -1;
  }

  // The thread's fragments: of its row tiles rows lane / 4 and that plus 8.
  __device__ __forceinline__ void read_queries() {
    bool found = false;
    bool found_lse = false;
#pragma unroll
    for (int tile = 0; tile < S::kRowTiles; ++tile) {
      const u32* row[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int token = token_of(warp() * 16 * S::kRowTiles + tile * 16 + half * 8 + lane() / 4);
        const i64 at = plane * p.tokens + token;
        row[half] = token < 0 ? nullptr : static_cast<const u32*>(p.q) + at * p.chunks * 4;
        // A row that there is not gets nothing.
        float lse = -negative_infinity();
        if (p.lse != nullptr && token >= 0) {
          lse = __ldg(p.lse + at);
          found_lse = found_lse || !is_finite(lse);
        }
        top[2 * tile + half] = p.lse != nullptr ? -kLog2E * lse : kNothing;
        sum[2 * tile + half] = 0.0f;
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        u32 pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int word = 8 * step + 4 * (i >> 1) + (lane() & 3);
          const u32* const from = row[i & 1];
          pairs[i] = from != nullptr && word < 4 * p.chunks ? __ldg(from + word) : 0u;
          found = found || not_finite<T>(pairs[i]);
        }
        if (step < kHeld) {
#pragma unroll
          for (int i = 0; i < 4; ++i) q[tile][step < kHeld ? step : 0][i] = pairs[i];
        } else {
          s.q[warp()][tile][step - kHeld][lane()] =
              make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
      }
    }
    if (found && p.q_flag != nullptr) *p.q_flag = 1;
    if (found_lse && p.lse_flag != nullptr) *p.lse_flag = 1;
    if (found || found_lse) s.bad = 1;
  }

  // At the group's own tokens, so that all CTAs of a plane look at all keys.
  __device__ __forceinline__ void look_at_keys() const {
    bool found = false;
    const u32 chunks = static_cast<u32>(p.chunks);
#pragma unroll 1
    for (u32 i = threadIdx.x; i < S::kRows * chunks; i += kThreads) {
      const int token = token_of(static_cast<int>(i / chunks));
      if (token < 0) break;
      const uint4* const row =
          static_cast<const uint4*>(p.k) + (plane * p.tokens + token) * p.chunks;
      const uint4 v = __ldg(row + i % chunks);
      found = found || not_finite<T>(v.x) || not_finite<T>(v.y) || not_finite<T>(v.z) ||
              not_finite<T>(v.w);
    }
    if (found && p.k_flag != nullptr) *p.k_flag = 1;
    if (found) s.bad = 1;
  }

  // Starts the copy of where a step's keys are; behind the last one that is token 0.
  __device__ __forceinline__ void copy_places(int step) const {
    if (step >= steps || threadIdx.x >= kKeys) return;
    const int place = tile_of(step) * kKeys + static_cast<int>(threadIdx.x);
    const bool there = place < p.tokens;
    cp_async4(smem_address(&s.places[step & 1][threadIdx.x]), p.order + (there ? place : 0), there);
  }

  // Starts the copy of a step's keys, whose places have arrived.
  __device__ __forceinline__ void copy_keys(int step) const {
    constexpr int kRowsApart = kThreads / kChunks;
    const int chunk = static_cast<int>(threadIdx.x) % kChunks;
    const int row = static_cast<int>(threadIdx.x) / kChunks;
    const u32 target = smem_address(s.keys[step & 1]);
    const u32 row_bytes = static_cast<u32>(p.chunks) * 16u;
    const u64 from = reinterpret_cast<u64>(p.k) +
                     static_cast<u64>(plane) * static_cast<u32>(p.tokens) * row_bytes + 16u * chunk;
#pragma unroll
    for (int i = 0; i < kKeys; i += kRowsApart) {
      const u32 token = static_cast<u32>(s.places[step & 1][row + i]);
      cp_async16(target + swizzled(row + i, chunk), mad_wide(token, row_bytes, from),
                 chunk < p.chunks);
    }
  }

  // Waits for a step's keys, and starts the copies of the next ones.
  __device__ __forceinline__ void arrive(int step) const {
    cp_async_wait<0>();
    __syncthreads();  // all that was copied is visible; every warp is done with the step before
    if (step + 1 < steps) copy_keys(step + 1);
    copy_places(step + 2);
    cp_async_commit();
  }

  // Gives the products with each part of a step's keys.
  template <typename Take>
  __device__ __forceinline__ void multiply(int step, Take take) const {
    const u32 from = smem_address(s.keys[step & 1]) +
                     swizzled((lane() & 7) + ((lane() >> 4) << 3), (lane() >> 3) & 1);
#pragma unroll 1
    for (int part = 0; part < kKeys / kPart; ++part) {
      Products c;
#pragma unroll
      for (int tile = 0; tile < S::kRowTiles; ++tile)
#pragma unroll
        for (int n = 0; n < kPartTiles; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) c[tile][n][e] = 0.0f;
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        u32 b[kPartTiles / 2][4];
#pragma unroll
        for (int pair = 0; pair < kPartTiles / 2; ++pair)
          ldmatrix_x4(b[pair], (from ^ ((2 * k & 7) << 4)) + (2 * k & ~7) * 16 +
                                   (part * kPart + pair * 16) * kRowBytes);
#pragma unroll
        for (int tile = 0; tile < S::kRowTiles; ++tile) {
          auto add = [&](const u32(&a)[4]) {
#pragma unroll
            for (int n = 0; n < kPartTiles; ++n)
              mma_m16n8k16<T>(c[tile][n], a, b[n >> 1][2 * (n & 1)], b[n >> 1][2 * (n & 1) + 1]);
          };
          if (k < kHeld) {
            add(q[tile][k < kHeld ? k : 0]);
          } else {
            const uint4 v = s.q[warp()][tile][k - kHeld][lane()];
            const u32 a[4] = {v.x, v.y, v.z, v.w};
            add(a);
          }
        }
      }
      take(part, c);
    }
  }

  // Scores with keys that there are not count for nothing.
  __device__ __forceinline__ void leave_out(int part, Products& c) const {
    const int left = p.tokens - (tiles - 1) * kKeys - part * kPart - 2 * (lane() & 3);
#pragma unroll
    for (int tile = 0; tile < S::kRowTiles; ++tile)
#pragma unroll
      for (int n = 0; n < kPartTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (8 * n + (e & 1) >= left) c[tile][n][e] = negative_infinity();
  }

  __device__ __forceinline__ void add_to_rows(const Products& c) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float most = negative_infinity();
#pragma unroll
      for (int n = 0; n < kPartTiles; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) most = fmaxf(most, c[r >> 1][n][2 * (r & 1) + e]);
      const float reference = fmaxf(top[r], most * p.scale_log2);
      sum[r] *= exp2_approx(top[r] - reference);
#pragma unroll
      for (int n = 0; n < kPartTiles; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          sum[r] += exp2_approx(c[r >> 1][n][2 * (r & 1) + e] * p.scale_log2 - reference);
      top[r] = reference;
    }
  }

  // Of the four lanes of a row: what add_up adds to its scores.
  __device__ __forceinline__ void finish_rows() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = warp() * 16 * S::kRowTiles + (r >> 1) * 16 + (r & 1) * 8 + lane() / 4;
      float most = top[r];
#pragma unroll
      for (int apart = 1; apart < 4; apart *= 2)
        most = fmaxf(most, __shfl_xor_sync(~0u, most, apart));
      float whole = sum[r] * exp2_approx(top[r] - most);
#pragma unroll
      for (int apart = 1; apart < 4; apart *= 2) whole += __shfl_xor_sync(~0u, whole, apart);
      top[r] = first + row < p.tokens ? -(most + log2_approx(whole)) : negative_infinity();
    }
  }

  // Adds up each column over the warp's rows, and leaves the sums in shared memory. Of the eight
  // lanes that have the same columns, two at a time exchange halves, until each has one column.
  __device__ __forceinline__ void add_to_columns(int step, int part, const Products& c) const {
    float sums[2 * kPartTiles];
#pragma unroll
    for (int n = 0; n < kPartTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float column = 0.0f;
#pragma unroll
        for (int r = 0; r < kRows; ++r)
          column += exp2_approx(c[r >> 1][n][2 * (r & 1) + e] * p.scale_log2 + top[r]);
        sums[2 * n + e] = column;
      }
    }
    auto exchanged = [](float low, float high, int apart) {
      const bool upper = (lane() & apart) != 0;
      return (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, apart);
    };
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const int count = kPartTiles >> i;
#pragma unroll
      for (int j = 0; j < count; ++j) sums[j] = exchanged(sums[j], sums[j + count], 16 >> i);
    }
    float* const out = s.sums[step & 1][warp()] + part * kPart + 2 * (lane() & 3);
    if constexpr (kPart == 32) {
      out[lane() / 8 * 8 + (lane() / 4 & 1)] = sums[0];
    } else {
      sums[0] += __shfl_xor_sync(~0u, sums[0], 4);
      if ((lane() & 4) == 0) out[lane() / 16 * 8 + (lane() / 8 & 1)] = sums[0];
    }
  }

  // Writes a step's sums over all warps.
  __device__ __forceinline__ void put(int step) const {
    if (threadIdx.x >= kKeys / 2) return;
    float2 all = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < S::kWarps; ++w) {
      const float2 own = *reinterpret_cast<const float2*>(&s.sums[step & 1][w][2 * threadIdx.x]);
      all.x += own.x;
      all.y += own.y;
    }
    u16* const row = p.out + (plane * p.groups + first / S::kRows) * p.pitch;
    *reinterpret_cast<u32*>(row + tile_of(step) * kKeys + 2 * threadIdx.x) =
        s.bad ? 0x7fff7fffu : pack2<half_t>(fminf(all.x, kMost), fminf(all.y, kMost));
  }

  const ColumnSumsParams& p;
  ColumnSumsStorage& s;
  const i64 plane;
  const int first;  // place of the group's first query
  const int tiles;  // of keys
  int steps;
  u32 q[S::kRowTiles][kHeld][4];
  float top[kRows];  // in log2 units: the first walk's reference, then minus the LSE
  float sum[kRows];
};

template <typename T, int kWarps>
__device__ __forceinline__ void column_sums(const ColumnSumsParams& p) {
  static_assert(kWarps == ColumnSumsStorage::kWarps, "a group's queries are those of four warps");
  extern __shared__ __align__(1024) u8 dynamic_smem[];
  ColumnSumsStorage& s = *reinterpret_cast<ColumnSumsStorage*>(dynamic_smem);
  if (p.chunks <= 8) {
    ColumnSums<T, 4>(p, s).run();
  } else if (p.chunks <= 16) {
    ColumnSums<T, 8>(p, s).run();
  } else {
    ColumnSums<T, 16>(p, s).run();
  }
}

}  // namespace tessera

// The one entry of a specialisation. Two CTAs have registers, as shared memory has room for two
// where rows have at most 128 elements.
#define TESSERA_COLUMN_SUMS(T, WARPS, MIN_CTAS)                               \
  static_assert(MIN_CTAS == 1, "long rows leave room for one CTA");           \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, 2)                 \
      column_sums(const __grid_constant__ tessera::ColumnSumsParams params) { \
    tessera::column_sums<tessera::T, WARPS>(params);                          \
  }
