// Block-sparse attention forward with mma.sync, for every GPU since Ampere.
//
//   O[r] = sum_c P[r, c] V[c] / sum_c P[r, c],   P[r, c] = exp(scale * Q[r] . K[c])
//   over the key rows c that the tile's fragments list for row r; LSE[r] = ln sum_c P[r, c].
//
// One CTA takes one task: kTileQ query rows (any number up to that is valid) and a range of
// steps. A step is kTileKV columns filled from fragments: KV rows that lie anywhere, each copied
// by 16-byte cp.async from its own address, so a fragment may have any length down to one row.
//
// Gather: the rows of some fragments lie anywhere. Their columns' source rows are copied from the
// list of rows into the step's table, which is otherwise computed, and are there a step ahead.
//
// Roles: all kWarps warps copy; warp w multiplies rows [w * 16 kRowTiles, (w + 1) * 16 kRowTiles).
// A warp skips the products of a step that none of its rows is a member of, and runs no mask
// code on a step that all of its rows attend to in full.
//
// Shared memory, rows of kHeadDim elements with 16-byte chunks XOR-swizzled by row:
//   Q  kTileQ * kHeadDim * 2 bytes (the O tile on the way out); shared with V when Q moves to
//      registers
//   V  kStages * kTileKV * kHeadDim * 2
//   K  kStages * kTileKV * kHeadDim * 2
//   step tables (2 kStages): source row of each column, membership of each 8 columns
// kStages = 1: V arrives during QK, the next K during the softmax and PV; two barriers a step.
// kStages = 2: the next K and V arrive during the whole step; one barrier.
//
// The row maximum is a reference that trails the true one by at most 2^kLag: O is rescaled only
// when some row of the warp outgrows it, and the common step needs no shuffle at all. The quotient
// is unchanged, since numerator and denominator use the same reference.
#pragma once

#include "common/ptx.cuh"
#include "common/task_times.cuh"
#include "common/types.cuh"

namespace tessera {

template <typename T_, int kHeadDim_, int kTileQ_, int kTileKV_, int kWarps_, int kStages_,
          bool kBits_, bool kGather_>
struct AttendConfig {
  using T = T_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kTileQ = kTileQ_;
  static constexpr int kTileKV = kTileKV_;
  static constexpr int kWarps = kWarps_;
  static constexpr int kStages = kStages_;
  static constexpr bool kBits = kBits_;
  static constexpr bool kGather = kGather_;  // rows of fragments may lie anywhere

  static constexpr int kThreads = kWarps * 32;
  static constexpr int kRowTiles = kTileQ / (16 * kWarps);  // 16-row tiles of one warp
  static constexpr int kColTiles = kTileKV / 8;             // 8-column tiles of S
  static constexpr int kDimSteps = kHeadDim / 16;
  static constexpr int kChunks = kHeadDim / 8;  // 16-byte chunks of a row
  static constexpr int kRowBytes = kHeadDim * 2;
  static constexpr int kTables = 2 * kStages;  // a power of two, at least kStages + 1
  // Q fragments live in registers where they fit beside O and S.
  static constexpr bool kQInRegisters = kRowTiles == 1 && kHeadDim <= 128;

  static constexpr float kLag = 8.0f;  // log2 units by which a reference may trail its row
  // The reference of a row with nothing yet. Finite, so that a difference with it is never NaN.
  static constexpr float kNothing = -1e30f;

  static constexpr int kQBytes = kTileQ * kRowBytes;
  static constexpr int kKVBytes = kTileKV * kRowBytes;
  // Q that has moved to registers leaves its place to V, which comes later.
  static constexpr bool kQSharesV = kQInRegisters && kStages == 1 && kQBytes <= kKVBytes;
  static constexpr int kVOffset = kQSharesV ? 0 : kQBytes;
  static constexpr int kKOffset = kVOffset + kStages * kKVBytes;
  static constexpr int kTileBytes = kKOffset + kStages * kKVBytes;

  static_assert(is_same<T, half_t> || is_same<T, bf16_t>, "T is half_t or bf16_t");
  static_assert(kHeadDim % 32 == 0 && kHeadDim <= 256, "kHeadDim is a multiple of 32, at most 256");
  static_assert(kTileQ % (16 * kWarps) == 0, "each warp takes whole 16-row tiles");
  static_assert(kRowTiles == 1 || kRowTiles == 2, "a warp takes 16 or 32 rows");
  static_assert(kTileQ <= 192, "a fragment has 24 membership bits of 8 rows");
  static_assert(!kGather || (kTileQ <= 128 && !kBits),
                "gathered fragments use the bit of a group that tiles of 128 rows lack");
  static_assert(kTileKV % 16 == 0, "PV takes 16 columns at a time");
  static_assert(kStages * kTileKV <= kThreads, "one thread fills one column of the first tables");
  static_assert(kColTiles <= 32, "one lane reads the membership of one 8-column tile");
  static_assert(kStages == 1 || kStages == 2, "one or two stages");
  static_assert((kTileKV * kChunks) % kThreads == 0 && (kTileQ * kChunks) % kThreads == 0,
                "copies have no remainder");
};

// What a step's columns are: source row (or -1) of each, membership and bits of each 8 columns.
template <typename C>
struct alignas(16) StepTable {
  i32 row[C::kTileKV];
  u32 group[C::kColTiles];                        // valid columns << 24 | members
  i32 group_bits[C::kBits ? C::kColTiles : 1];    // index into bits, or -1
  i32 group_column[C::kBits ? C::kColTiles : 1];  // first column inside the fragment
};

// What the copies and the end need of the task. It lives in shared memory because the products need
// every register, and one read a step costs nothing.
struct TaskState {
  const u16* k;
  const u16* v;
  const Fragment* frags;  // of the tile
  const i32* frag_bits;
  i32 frag_count;
  i32 first_step;
  i32 direction;  // 1, or -1 when the steps are walked backwards
  i32 batch;
  i32 head;  // of the batch
  i32 first_row;
  i32 rows;
  i32 slot;
};

template <typename C>
struct SharedStorage {
  alignas(1024) u8 tiles[C::kTileBytes];  // Q, V, K
  StepTable<C> table[C::kTables];
  alignas(16) Fragment fragment[2][C::kColTiles];
  i32 fragment_bits[2][C::kBits ? C::kColTiles : 1];
  TaskState task;
  u32 members[C::kWarps];  // of each warp's row groups, the bits that exist
};

// A value that the compiler knows nothing of. NVRTC for Blackwell turns a comparison with a
// selected constant into five instructions where one does.
__device__ __forceinline__ int opaque(int value) {
  asm("" : "+r"(value));
  return value;
}

// Byte offset of a 16-byte chunk. Eight rows at one chunk fall into eight different bank groups.
template <typename C>
__device__ __forceinline__ int swizzled(int row, int chunk) {
  if constexpr (C::kChunks % 8 == 0) {
    return row * C::kRowBytes + ((chunk ^ (row & 7)) << 4);
  } else {
    return row * C::kRowBytes + ((chunk ^ ((row >> 1) & 3)) << 4);
  }
}

// The lane's part of a fragment address, and the rest as a compile-time chunk pair 2 * step: the
// XOR then costs one instruction, or none, and row blocks become immediate offsets.
template <typename C>
struct FragmentAddress {
  u32 even;
  u32 odd;

  __device__ __forceinline__ FragmentAddress(u32 tile, int row, int half)
      : even(tile + swizzled<C>(row, half)), odd(tile + swizzled<C>(row, 2 + half)) {}

  __device__ __forceinline__ u32 at(int row_block, int step) const {
    const int offset = row_block * 16 * C::kRowBytes;
    if constexpr (C::kChunks % 8 == 0) {
      return (even ^ ((2 * step & 7) << 4)) + (2 * step & ~7) * 16 + offset;
    } else {
      return ((step & 1) ? odd : even) + (step >> 1) * 64 + offset;
    }
  }
};

template <typename C>
struct Attend {
  using T = typename C::T;

  const AttendParams& p;
  SharedStorage<C>& smem;
  const int thread = threadIdx.x;
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;

  __device__ __forceinline__ const u16* row_pointer(const void* base, const Strides& stride,
                                                    int batch, int head, int row) const {
    return static_cast<const u16*>(base) + batch * stride.batch + head * stride.head +
           row * stride.row;
  }

  __device__ __forceinline__ StepTable<C>& table(u32 i) const { return smem.table[i % C::kTables]; }

  // Starts the copy of the i-th step's fragments; past the end they become empty ones.
  __device__ __forceinline__ void fetch_fragments(int i, int steps) const {
    const int count = C::kTileKV >> p.slot_log2;
    if (thread >= count) return;
    const int index = (smem.task.first_step + i * smem.task.direction) * count + thread;
    const bool valid = i < steps && index < smem.task.frag_count;
    const int source = valid ? index : 0;
    cp_async8(smem_address(&smem.fragment[i & 1][thread]), smem.task.frags + source, valid);
    if constexpr (C::kBits) {
      cp_async4(smem_address(&smem.fragment_bits[i & 1][thread]), smem.task.frag_bits + source,
                valid);
    }
  }

  // Enters column `at` of a step, which lies in this fragment, in the step's table. With kGather
  // its source row may be a copy that this thread has started.
  __device__ __forceinline__ void fill_column(StepTable<C>& entries, int at, Fragment fragment,
                                              i32 bits) const {
    const int column = at & ((1 << p.slot_log2) - 1);
    const int length = fragment.info >> 24;
    const u32 members = fragment.info & 0xffffffu;  // and kGathered, which is of no warp's rows
    // A fragment with no members is not loaded: its columns are zeros.
    const bool loaded = members != 0 && column < length;
    if (C::kGather && loaded && (fragment.info & kGathered) != 0u) {
      cp_async4(smem_address(&entries.row[at]), p.rows + fragment.start + column, true);
    } else {
      entries.row[at] = loaded ? fragment.start + column : -1;
    }
    if ((at & 7) == 0) {
      const int valid = min(max(length - column, 0), 8);
      entries.group[at >> 3] = (static_cast<u32>(valid) << 24) | members;
      if constexpr (C::kBits) {
        entries.group_bits[at >> 3] = length > 0 ? bits : -1;
        entries.group_column[at >> 3] = column;
      }
    }
  }

  // Turns the i-th step's fragments, which have landed, into its table.
  __device__ __forceinline__ void write_table(int i) const {
    if (thread >= C::kTileKV) return;
    const int index = thread >> p.slot_log2;
    i32 bits = -1;
    if constexpr (C::kBits) bits = smem.fragment_bits[i & 1][index];
    fill_column(table(i), thread, smem.fragment[i & 1][index], bits);
  }

  // Copies rows of a tensor into a swizzled tile; `rows_of(i)` gives the source rows of tile rows
  // i to i + 3, or negative. Rows that are not there, and the tail of the head dim, become zeros.
  template <int kRows, typename RowsOf>
  __device__ __forceinline__ void copy_rows(u8* tile, const u16* base, i64 row_stride,
                                            RowsOf rows_of) const {
    // A thread takes one 16-byte chunk of kRun neighbouring rows; their numbers are read at once.
    constexpr int kRun = kRows * C::kChunks / C::kThreads;
    const u32 target = smem_address(tile);
    const u32 row_bytes = static_cast<u32>(row_stride) * 2u;
    if constexpr (C::kThreads % C::kChunks == 0 && kRun % 4 == 0) {
      const int chunk = static_cast<u32>(thread) % C::kChunks;
      const int row0 = static_cast<u32>(thread) / C::kChunks * kRun;
      copy_run<kRun>(target, reinterpret_cast<u64>(base) + chunk * 16u, row_bytes, row0, chunk,
                     rows_of);
    } else {
      constexpr u32 kRuns = kRows / 4 * C::kChunks;
#pragma unroll 1
      for (u32 index = thread; index < kRuns; index += C::kThreads) {
        const int chunk = index % C::kChunks;
        copy_run<4>(target, reinterpret_cast<u64>(base) + chunk * 16u, row_bytes,
                    index / C::kChunks * 4, chunk, rows_of);
      }
    }
  }

  template <int kRun, typename RowsOf>
  __device__ __forceinline__ void copy_run(u32 target, u64 from, u32 row_bytes, int row0, int chunk,
                                           RowsOf rows_of) const {
    // Rows at or below this are not there: all of them, where the chunk is past the head dim.
    const int absent = opaque(chunk * 8 < p.head_dim ? -1 : 0x7fffffff);
    const u32 first = target + swizzled<C>(row0, chunk);
#pragma unroll
    for (int i = 0; i < kRun; i += 4) {
      const int4 rows = rows_of(row0 + i);
      const int row[4] = {rows.x, rows.y, rows.z, rows.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        // row0 is a multiple of kRun, so the swizzles of row0 and of i + j combine by XOR.
        constexpr int kRowBytes = C::kRowBytes;
        const u32 swizzle = swizzled<C>(i + j, 0) % kRowBytes;
        cp_async16((first ^ swizzle) + (i + j) * kRowBytes, mad_wide(row[j], row_bytes, from),
                   row[j] > absent);
      }
    }
  }

  __device__ __forceinline__ void load_kv(u8* tile, const u16* base, i64 row_stride,
                                          const StepTable<C>& table) const {
    copy_rows<C::kTileKV>(tile, base, row_stride, [&](int column) {
      return *reinterpret_cast<const int4*>(&table.row[column]);
    });
  }

  // The A operand of a row tile: its 16 rows, columns [16 step, 16 step + 16).
  __device__ __forceinline__ FragmentAddress<C> q_address() const {
    return {smem_address(smem.tiles), warp * C::kRowTiles * 16 + (lane & 15), lane >> 4};
  }

  // A negative scale: the kernel scales by its magnitude and flips Q's signs once, between
  // barriers.
  __device__ __forceinline__ void negate_q() const {
    u32* words = reinterpret_cast<u32*>(smem.tiles);
    for (int i = thread; i < C::kQBytes / 4; i += C::kThreads) words[i] ^= 0x80008000u;
  }

  // S += Q K^T. Operands are read one product ahead, to hide their latency.
  __device__ __forceinline__ void multiply_qk(
      float (&s)[C::kRowTiles][C::kColTiles][4],
      const u32 (&q)[C::kQInRegisters ? C::kDimSteps : 1][4], const u8* k_tile) const {
    constexpr int kPairs = C::kColTiles / 2;
    const FragmentAddress<C> q_from = q_address();
    const FragmentAddress<C> k_from(smem_address(k_tile), (lane & 7) + ((lane >> 4) << 3),
                                    (lane >> 3) & 1);
    u32 a[2][C::kRowTiles][4];
    u32 b[2][4];
    auto read_q = [&](int k) {
#pragma unroll
      for (int tile = 0; tile < C::kRowTiles; ++tile) {
        if constexpr (!C::kQInRegisters) ldmatrix_x4(a[k & 1][tile], q_from.at(tile, k));
      }
    };
    read_q(0);
    ldmatrix_x4(b[0], k_from.at(0, 0));
#pragma unroll
    for (int k = 0; k < C::kDimSteps; ++k) {
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        const int n = k * kPairs + j;
        if (j + 1 < kPairs) {
          ldmatrix_x4(b[(n + 1) & 1], k_from.at(j + 1, k));
        } else if (k + 1 < C::kDimSteps) {
          read_q(k + 1);
          ldmatrix_x4(b[(n + 1) & 1], k_from.at(0, k + 1));
        }
#pragma unroll
        for (int tile = 0; tile < C::kRowTiles; ++tile) {
          if constexpr (C::kQInRegisters) {
            mma_m16n8k16<T>(s[tile][2 * j], q[k], b[n & 1][0], b[n & 1][1]);
            mma_m16n8k16<T>(s[tile][2 * j + 1], q[k], b[n & 1][2], b[n & 1][3]);
          } else {
            mma_m16n8k16<T>(s[tile][2 * j], a[k & 1][tile], b[n & 1][0], b[n & 1][1]);
            mma_m16n8k16<T>(s[tile][2 * j + 1], a[k & 1][tile], b[n & 1][2], b[n & 1][3]);
          }
        }
      }
    }
  }

  // Columns [16 k, 16 k + 16) of P, packed as the A operand of PV, and their part of the row sums.
  __device__ __forceinline__ void exponentiate(const float (&s)[C::kRowTiles][C::kColTiles][4],
                                               int k, const float (&reference)[2 * C::kRowTiles],
                                               u32 (&pr)[C::kRowTiles][4],
                                               float (&sum)[2 * C::kRowTiles]) const {
#pragma unroll
    for (int r = 0; r < 2 * C::kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float* pair = &s[r >> 1][2 * k + i][2 * (r & 1)];
        const float x = exp2_approx(fmaf(pair[0], p.scale_log2, -reference[r]));
        const float y = exp2_approx(fmaf(pair[1], p.scale_log2, -reference[r]));
        if constexpr (C::kRowTiles == 1) {
          sum[r] += x;  // one at a time: ptxas then holds fewer of them, and three CTAs fit
          sum[r] += y;
        } else {
          sum[r] += x + y;
        }
        pr[r >> 1][(r & 1) + 2 * i] = pack2<T>(x, y);
      }
    }
  }

  // O += P V with P = 2^(scale S - reference), 16 columns at a time, and the row sums of P. V is
  // read ahead in the same way.
  __device__ __forceinline__ void multiply_pv(float (&o)[C::kRowTiles][C::kHeadDim / 8][4],
                                              const float (&s)[C::kRowTiles][C::kColTiles][4],
                                              const float (&reference)[2 * C::kRowTiles],
                                              float (&sum)[2 * C::kRowTiles],
                                              const u8* v_tile) const {
    const FragmentAddress<C> v_from(smem_address(v_tile), lane & 15, lane >> 4);
    u32 b[2][4];
    ldmatrix_x4_trans(b[0], v_from.at(0, 0));
#pragma unroll
    for (int k = 0; k < C::kColTiles / 2; ++k) {
      u32 pr[C::kRowTiles][4];
      exponentiate(s, k, reference, pr, sum);
#pragma unroll
      for (int j = 0; j < C::kDimSteps; ++j) {
        const int n = k * C::kDimSteps + j;
        const int next_k = k + (j + 1) / C::kDimSteps;
        if (next_k < C::kColTiles / 2) {
          ldmatrix_x4_trans(b[(n + 1) & 1], v_from.at(next_k, (j + 1) % C::kDimSteps));
        }
#pragma unroll
        for (int tile = 0; tile < C::kRowTiles; ++tile) {
          mma_m16n8k16<T>(o[tile][2 * j], pr[tile], b[n & 1][0], b[n & 1][1]);
          mma_m16n8k16<T>(o[tile][2 * j + 1], pr[tile], b[n & 1][2], b[n & 1][3]);
        }
      }
    }
  }

  // Scores of pairs that are off start from -inf: membership, columns past a fragment, token bits.
  // Masking before the product rather than after it spares copies of S where the branch joins.
  __device__ __forceinline__ void mask(float (&s)[C::kRowTiles][C::kColTiles][4],
                                       const StepTable<C>& table) const {
    const int column = (lane & 3) * 2;
#pragma unroll
    for (int j = 0; j < C::kColTiles; ++j) {
      const u32 group = table.group[j];
      const int valid = group >> 24;
      const u32 members = group >> (warp * C::kRowTiles * 2);
#pragma unroll
      for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          bool keep = (members >> (2 * tile + half)) & 1u;
          u32 word = 0xffu;
          if constexpr (C::kBits) {
            const int index = table.group_bits[j];
            if (index >= 0) {
              const int row = (warp * C::kRowTiles + tile) * 16 + half * 8 + (lane >> 2);
              const int first = table.group_column[j];
              const int words = ((1 << p.slot_log2) + 31) >> 5;
              word = __ldg(p.bits + (static_cast<i64>(index) * C::kTileQ + row) * words +
                           (first >> 5)) >>
                     (first & 31);
            }
          }
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const bool on = keep && column + e < valid && ((word >> (column + e)) & 1u);
            if (!on) s[tile][j][2 * half + e] = negative_infinity();
          }
        }
      }
    }
  }

  __device__ __forceinline__ u8* k_tile(int i) const {
    return smem.tiles + C::kKOffset + (C::kStages == 2 ? (i & 1) * C::kKVBytes : 0);
  }

  __device__ __forceinline__ u8* v_tile(int i) const {
    return smem.tiles + C::kVOffset + (C::kStages == 2 ? (i & 1) * C::kKVBytes : 0);
  }

  __device__ __forceinline__ void load_k(int i) const {
    load_kv(k_tile(i), smem.task.k, p.k_stride.row, table(i));
  }

  __device__ __forceinline__ void load_v(int i) const {
    load_kv(v_tile(i), smem.task.v, p.v_stride.row, table(i));
  }

  struct Membership {
    bool any;   // some row of the warp takes part in the step
    bool full;  // all of them do, in every column
  };

  // Waits for the step's K (and V), starts the copies that its products will cover, and says,
  // uniformly over the warp, what part the warp has in the step.
  __device__ __forceinline__ Membership begin_step(int i, int steps) const {
    cp_async_wait<0>();
    barrier_sync();  // the copies are visible; every warp is done with the step before
    if constexpr (C::kStages == 1) {
      load_v(i);
      write_table(i + 1);
      fetch_fragments(i + 2, steps);
    } else {
      if (i + 1 < steps) {
        load_k(i + 1);
        load_v(i + 1);
      }
      write_table(i + 2);
      fetch_fragments(i + 3, steps);
    }
    cp_async_commit();

    constexpr u32 kAllRows = (1u << (2 * C::kRowTiles)) - 1u;
    const StepTable<C>& entries = table(i);
    const u32 existing = smem.members[warp];
    const u32 group = lane < C::kColTiles ? entries.group[lane] : 0u;
    const u32 members = (group >> (warp * 2 * C::kRowTiles)) & kAllRows & existing;
    const u32 valid = group >> 24;
    bool whole = members == existing && valid == 8u;
    if constexpr (C::kBits) whole = whole && entries.group_bits[lane % C::kColTiles] < 0;
    return {__any_sync(~0u, members != 0u && valid != 0u) != 0,
            __all_sync(~0u, lane >= C::kColTiles || whole) != 0};
  }

  // The second barrier of the single-stage pipeline, after the last use of K.
  __device__ __forceinline__ void turn_over_k(int i, int steps) const {
    if constexpr (C::kStages == 1) {
      cp_async_wait<0>();
      barrier_sync();  // V has landed; every warp is done with K; the next table is written
      if (i + 1 < steps) load_k(i + 1);
      cp_async_commit();
    }
  }

  // Raises the references of rows that the new scores outgrow, and scales O and the sums to them.
  // References are whole numbers (log2 units): every factor is a power of two, so nothing rounds.
  __device__ __forceinline__ void grow(const float (&s)[C::kRowTiles][C::kColTiles][4],
                                       float (&o)[C::kRowTiles][C::kHeadDim / 8][4],
                                       float (&reference)[2 * C::kRowTiles],
                                       float (&sum)[2 * C::kRowTiles]) const {
    bool outgrown = false;
    float largest[2 * C::kRowTiles];
#pragma unroll
    for (int r = 0; r < 2 * C::kRowTiles; ++r) {
      float even = s[r >> 1][0][2 * (r & 1)];
      float odd = s[r >> 1][0][2 * (r & 1) + 1];
#pragma unroll
      for (int j = 1; j < C::kColTiles; ++j) {
        even = fmaxf(even, s[r >> 1][j][2 * (r & 1)]);
        odd = fmaxf(odd, s[r >> 1][j][2 * (r & 1) + 1]);
      }
      largest[r] = fmaxf(even, odd) * p.scale_log2;
      outgrown = outgrown || largest[r] > reference[r] + C::kLag;
    }
    if (!__any_sync(~0u, outgrown)) return;
#pragma unroll
    for (int r = 0; r < 2 * C::kRowTiles; ++r) {
      float top = largest[r];
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      top = fmaxf(ceilf(top), reference[r]);
      const float factor = top == reference[r] ? 1.0f : exp2_approx(reference[r] - top);
      reference[r] = top;
      sum[r] *= factor;
#pragma unroll
      for (int j = 0; j < C::kHeadDim / 8; ++j) {
        o[r >> 1][j][2 * (r & 1)] *= factor;
        o[r >> 1][j][2 * (r & 1) + 1] *= factor;
      }
    }
  }

  // What each thread reads of the first tables, where K will be.
  struct FirstFragments {
    Fragment fragment[C::kThreads];
    i32 bits[C::kThreads];
  };
  static_assert(sizeof(FirstFragments) <= C::kKVBytes, "the first fragments fit where K will be");

  // Starts the copies of Q and of the first K (and V), and returns the number of steps.
  //
  // Two dependent reads lead to the first K: the task, and the fragment of one column of the first
  // tables, which each thread copies for itself. Q is on its way in the meantime.
  __device__ __forceinline__ int begin_task() const {
    const Task task = p.tasks[blockIdx.x];
    const int steps = task.end - task.begin;
    const int rows = task.rows;
    const int first_step = task.flags & kReverse ? task.end - 1 : task.begin;
    const int direction = task.flags & kReverse ? -1 : 1;

    const int i = thread / C::kTileKV;
    const int column = thread % C::kTileKV;
    const int index = ((first_step + i * direction) * C::kTileKV + column) >> p.slot_log2;
    const bool valid = i < min(C::kStages, steps) && index < task.frag_count;
    const i64 source = valid ? task.frag_begin + index : 0;
    auto& scratch = *reinterpret_cast<FirstFragments*>(k_tile(0));
    cp_async8(smem_address(&scratch.fragment[thread]), p.frags + source, valid);
    if constexpr (C::kBits) {
      cp_async4(smem_address(&scratch.bits[thread]), p.frag_bits + source, valid);
    }
    cp_async_commit();

    const int batch = static_cast<u32>(task.head) / static_cast<u32>(p.q_heads);
    const int head = task.head - batch * p.q_heads;
    const int kv_head = static_cast<u32>(head) / static_cast<u32>(p.q_per_kv);
    copy_rows<C::kTileQ>(smem.tiles, row_pointer(p.q, p.q_stride, batch, head, task.first_row),
                         p.q_stride.row, [&](int row) {
                           return make_int4(row < rows ? row : -1, row + 1 < rows ? row + 1 : -1,
                                            row + 2 < rows ? row + 2 : -1,
                                            row + 3 < rows ? row + 3 : -1);
                         });
    cp_async_commit();

    if (thread == 0) {
      smem.task = {row_pointer(p.k, p.k_stride, batch, kv_head, 0),
                   row_pointer(p.v, p.v_stride, batch, kv_head, 0),
                   p.frags + task.frag_begin,
                   p.frag_bits + task.frag_begin,
                   task.frag_count,
                   first_step,
                   direction,
                   batch,
                   head,
                   task.first_row,
                   rows,
                   task.slot};
    }
    if (lane == 0) {
      // Rows past the tile do not count as members, nor against a full step.
      const int warp_rows = rows - warp * 16 * C::kRowTiles;
      const int groups = (warp_rows + kGroupRows - 1) / kGroupRows;
      smem.members[warp] = (1u << min(max(groups, 0), 2 * C::kRowTiles)) - 1u;
    }
    cp_async_wait<1>();  // each thread's own fragment
    i32 bits = -1;
    if constexpr (C::kBits) bits = scratch.bits[thread];
    if (i < C::kStages) fill_column(table(i), column, scratch.fragment[thread], bits);
    if constexpr (C::kGather) {
      cp_async_commit();
      cp_async_wait<0>();
    }
    barrier_sync();
    if (steps > 0) {
      load_k(0);
      if constexpr (C::kStages == 2) load_v(0);
    }
    fetch_fragments(C::kStages, steps);
    cp_async_commit();
    return steps;
  }

  __device__ __forceinline__ void run() {
    constexpr int kRowsPerThread = 2 * C::kRowTiles;
    constexpr int kOutTiles = C::kHeadDim / 8;

    const int steps = begin_task();
    float o[C::kRowTiles][kOutTiles][4];
    float reference[kRowsPerThread];
    float sum[kRowsPerThread];
    u32 q[C::kQInRegisters ? C::kDimSteps : 1][4];
#pragma unroll
    for (int tile = 0; tile < C::kRowTiles; ++tile)
#pragma unroll
      for (int j = 0; j < kOutTiles; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[tile][j][i] = 0.0f;
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      reference[r] = C::kNothing;
      sum[r] = 0.0f;
    }

    if (C::kQInRegisters || p.negate) {
      cp_async_wait<1>();
      barrier_sync();  // Q has landed
    }
    if (p.negate) {
      negate_q();
      barrier_sync();
    }

    if constexpr (C::kQInRegisters) {
      const FragmentAddress<C> from = q_address();
#pragma unroll
      for (int k = 0; k < C::kDimSteps; ++k) ldmatrix_x4(q[k], from.at(0, k));
    }

    for (int i = 0;; ++i) {
      // Steps that this warp has no part in turn round here, and leave O in its registers.
      Membership member;
      for (; i < steps; ++i) {
        member = begin_step(i, steps);
        if (member.any) break;
        turn_over_k(i, steps);
      }
      if (i == steps) break;

      float s[C::kRowTiles][C::kColTiles][4];
#pragma unroll
      for (int tile = 0; tile < C::kRowTiles; ++tile)
#pragma unroll
        for (int j = 0; j < C::kColTiles; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) s[tile][j][e] = 0.0f;
      if (!member.full) mask(s, table(i));
      multiply_qk(s, q, k_tile(i));
      turn_over_k(i, steps);
      grow(s, o, reference, sum);
      multiply_pv(o, s, reference, sum, v_tile(i));
    }
    cp_async_wait<0>();
    finish(o, reference, sum);
  }

  __device__ __forceinline__ void finish(float (&o)[C::kRowTiles][C::kHeadDim / 8][4],
                                         const float (&reference)[2 * C::kRowTiles],
                                         float (&sum)[2 * C::kRowTiles]) {
    constexpr int kRowsPerThread = 2 * C::kRowTiles;
    const TaskState& task = smem.task;
    const int rows = task.rows;
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
      sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
    }

    if (task.slot >= 0) {
#pragma unroll
      for (int r = 0; r < kRowsPerThread; ++r) {
        const int row = warp * 16 * C::kRowTiles + r * 8 + (lane >> 2);
        if (row >= rows) continue;
        const i64 index = static_cast<i64>(task.slot) * C::kTileQ + row;
        float2* target = reinterpret_cast<float2*>(p.partial_o + index * C::kHeadDim);
#pragma unroll
        for (int j = 0; j < C::kHeadDim / 8; ++j) {
          target[j * 4 + (lane & 3)] =
              make_float2(o[r >> 1][j][2 * (r & 1)], o[r >> 1][j][2 * (r & 1) + 1]);
        }
        if ((lane & 3) == 0) {
          reinterpret_cast<float2*>(p.partial_ml)[index] = make_float2(reference[r], sum[r]);
        }
      }
      return;
    }

    // Each warp stages its own rows where its Q was, then stores whole 16-byte chunks.
    barrier_sync();  // every warp is done with V, which may lie where Q was, and Q's own copies are
                     // over
    u8* staged = smem.tiles;
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      const int row = warp * 16 * C::kRowTiles + r * 8 + (lane >> 2);
      const float inverse = sum[r] != 0.0f ? 1.0f / sum[r] : 0.0f;
#pragma unroll
      for (int j = 0; j < C::kHeadDim / 8; ++j) {
        *reinterpret_cast<u32*>(staged + swizzled<C>(row, j) + (lane & 3) * 4) =
            pack2<T>(o[r >> 1][j][2 * (r & 1)] * inverse, o[r >> 1][j][2 * (r & 1) + 1] * inverse);
      }
      if (p.lse != nullptr && (lane & 3) == 0 && row < rows) {
        const float lse = sum[r] != 0.0f
                              ? (reference[r] + log2_approx(sum[r])) * 0.6931471805599453f
                              : negative_infinity();
        p.lse[(static_cast<i64>(task.batch) * p.q_heads + task.head) * p.sq + task.first_row +
              row] = lse;
      }
    }
    __syncwarp();
    u16* out =
        const_cast<u16*>(row_pointer(p.o, p.o_stride, task.batch, task.head, task.first_row));
    constexpr int kWarpRows = 16 * C::kRowTiles;
#pragma unroll 4
    for (int index = lane; index < kWarpRows * C::kChunks; index += 32) {
      const int row = warp * kWarpRows + index / C::kChunks;
      const int chunk = index % C::kChunks;
      if (row < rows && chunk * 8 < p.head_dim) {
        const uint4 data = *reinterpret_cast<const uint4*>(staged + swizzled<C>(row, chunk));
        *reinterpret_cast<uint4*>(out + row * p.o_stride.row + chunk * 8) = data;
      }
    }
  }
};

template <typename C>
__device__ __forceinline__ void attend_mma(const AttendParams& params) {
  extern __shared__ __align__(1024) u8 dynamic_smem[];
  if (params.counts != nullptr && blockIdx.x >= params.counts[kTasks]) return;
  Attend<C> attend{params, *reinterpret_cast<SharedStorage<C>*>(dynamic_smem)};
  attend.run();
}

// The same, keeping time.
template <typename C>
__device__ __forceinline__ void attend_mma(const Timed<AttendParams>& timed) {
  const i64* counts = timed.params.counts;
  if (counts != nullptr && blockIdx.x >= counts[kTasks]) return;
  const TaskClock clock(timed.times, 0, 1, threadIdx.x == 0);
  clock.begin(blockIdx.x);
  attend_mma<C>(timed.params);
  barrier_sync();  // every warp is done
  clock.end(blockIdx.x);
}

}  // namespace tessera

// The one entry of a specialisation, and the one that keeps time.
#define TESSERA_ATTEND_MMA(...) TESSERA_ATTEND_MMA_OF(tessera::AttendParams, __VA_ARGS__)
#define TESSERA_ATTEND_MMA_TIMED(...) \
  TESSERA_ATTEND_MMA_OF(tessera::Timed<tessera::AttendParams>, __VA_ARGS__)
#define TESSERA_ATTEND_MMA_OF(PARAMS, T, HEAD_DIM, TILE_Q, TILE_KV, WARPS, STAGES, BITS, GATHER,   \
                              MIN_CTAS)                                                            \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)                               \
      attend(const __grid_constant__ PARAMS params) {                                              \
    using Config =                                                                                 \
        tessera::AttendConfig<tessera::T, HEAD_DIM, TILE_Q, TILE_KV, WARPS, STAGES, BITS, GATHER>; \
    tessera::attend_mma<Config>(params);                                                           \
  }
