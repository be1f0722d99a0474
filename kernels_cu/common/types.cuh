// Plain types shared by all kernels, and the by-value structs that the host passes.
// No toolkit header is included anywhere, so NVRTC alone builds every kernel.
#pragma once

namespace tessera {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

struct half_t {
  u16 raw;
};
struct bf16_t {
  u16 raw;
};

template <typename A, typename B>
inline constexpr bool is_same = false;
template <typename A>
inline constexpr bool is_same<A, A> = true;

// Rows in one membership group: a thread of mma.m16n8k16 holds rows r and r + 8.
inline constexpr int kGroupRows = 8;

enum TaskFlag {
  kReverse = 1,  // walk the steps from the last to the first
  kTwin = 2,     // this task and its neighbour, of the even and the odd place, have the same list
};

// One CTA's work: steps [begin, end) of a tile for one query head (see organization/tasks.py), with
// the tile's own numbers copied in, so that one read leads to the fragments.
struct alignas(16) Task {
  i32 head;        // batch * q_heads + query head
  i32 begin;       // first step
  i32 end;         // one past the last step
  i32 slot;        // workspace slot of a split-K part, or -1
  i32 flags;       // TaskFlag
  i32 first_row;   // first query row
  i32 rows;        // query rows, 1 to the tile's, as rows_of and first_half read them
  i32 frag_count;  // fragments of the tile's list
  i64 frag_begin;  // index of the first one
  i64 units;       // index of the first of the tile's 16-row units, or -1: its rows are neighbours
};

// A tile's word of rows, in its tasks and its tile_q: the low 16 bits are the number of its query
// rows. The rest is 0 where these are the tile's first rows, else 1 + the rows of the first half of
// a tile of halves, whose second half begins in the middle of the tile (mapping/tiles.py).
__device__ __forceinline__ int rows_of(i32 word) { return word & 0xffff; }
// Rows of the first half, or -1.
__device__ __forceinline__ int first_half(i32 word) { return (word >> 16) - 1; }
__device__ __forceinline__ i32 word_of_halves(int first, int rows) {
  return (first + 1) << 16 | rows;
}

// A fragment of KV rows, 8 bytes: first row; length in the top 8 bits, members in the low 24. With
// the bit kGathered, which tiles of 128 rows have no group for, its rows lie anywhere: `start` is
// the index of the first of them in a list of rows.
inline constexpr u32 kGathered = 1u << 23;
struct Fragment {
  i32 start;
  u32 info;
};

// The i64 counts[8] of tasks that a GPU made (tile_scan.cu); the rest is 0. With errors there are
// no tasks. Launches are then as large as the geometry can need, and what is not below a count has
// nothing to do. The stamp is the launch's own, and tells its counts from older ones.
enum TileCount { kFragments, kTasks, kMerges, kSlots, kErrors, kStamp = 7 };

// Element strides of a (batch, head, row, head_dim) tensor whose last axis is contiguous.
struct Strides {
  i64 batch;
  i64 head;
  i64 row;
};

struct AttendParams {
  const void* q;
  const void* k;
  const void* v;
  void* o;
  float* lse;  // (batch, q_heads, sq) natural log, or null
  Strides q_stride;
  Strides k_stride;
  Strides v_stride;
  Strides o_stride;
  const Task* tasks;
  const Fragment* frags;
  const i32* frag_bits;  // index into bits, or -1; read by the token-bit variant only
  const u32* bits;       // (n, kTileQ, ceil(slot / 32))
  float* partial_o;      // (slots, kTileQ, kHeadDim) unnormalised
  float* partial_ml;     // (slots, kTileQ, 2): row maximum (log2 units), row sum
  i32 q_heads;
  i32 q_per_kv;
  i32 head_dim;  // at most kHeadDim; the rest is zero-filled
  i32 sq;
  i32 slot_log2;      // columns of one fragment slot
  float scale_log2;   // |sm_scale| * log2(e), never zero
  i32 negate;         // 1 when sm_scale is negative
  const i64* counts;  // TileCount, or null: there is a task for each CTA
  const i32* rows;    // of gathered fragments, of entries that gather them
};

// What cuTensorMapEncodeTiled wrote; travels by value.
struct alignas(64) TensorMap {
  u64 opaque[16];
};

struct WgmmaParams {
  TensorMap q;       // (dim, row, head, batch), boxes of 64 x 16
  TensorMap k_rows;  // (dim, row, head, batch), boxes of 64 x 8: fragments at any row, and tails
  TensorMap v_rows;
  TensorMap k_fragment;  // (64, 16, slab, 8-row group, batch * head), boxes of one slot
  TensorMap v_fragment;
  void* o;
  float* lse;
  Strides o_stride;
  const Task* tasks;
  const Fragment* frags;
  const i32* units;  // first row of each 16-row unit, -1 without rows; null without any
  float* partial_o;
  float* partial_ml;
  i32 task_count;
  i32 q_heads;
  i32 q_per_kv;
  i32 head_dim;
  i32 sq;
  i32 slot_log2;
  i32 whole_rows;  // rows that the fragment maps reach: whole groups of 8, or 0 without such a map
  float scale_log2;
  i32 negate;
  const i64* counts;     // TileCount, whose tasks are the task_count; or null
  const i32* frag_bits;  // as in AttendParams
  const u32* bits;
  // Of entries that gather rows:
  const u16* k;
  const u16* v;
  Strides k_stride;
  Strides v_stride;
  const i32* rows;  // of gathered fragments
};

struct MergeParams {
  void* o;
  float* lse;
  Strides o_stride;
  const i32* merge_head;
  const i32* merge_tile;
  const i32* merge_offsets;
  const i32* tile_q;  // (tiles, 2): first row, word of rows
  const i32* units;   // (tiles, tile_rows / 16): first row of each 16 rows, or null: neighbours
  const float* partial_o;
  const float* partial_ml;
  i32 q_heads;
  i32 head_dim;
  i32 sq;
  i32 tile_rows;      // rows of one workspace slot
  i32 row_width;      // floats of one workspace row
  const i64* counts;  // TileCount, or null: there is a merge for each CTA
};

}  // namespace tessera
