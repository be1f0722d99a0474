// A mask in GPU memory, in any of four formats, to the bitmap that the other builders read.
//
//   bitmap     u32 [rows][words], words = ceil(nk / 32): bit c % 32 of word c / 32 is block column
//              c; bits past nk are 0. rows = mask batch * mask heads * nq; heads that broadcast are
//              not expanded.
//   row_count  i32 [rows]: columns that are on.
//   scalars    i64 [8], zeros before the launch: columns on in all; those of them in runs of two
//              or more neighbours of a row; 0; 0; error flags; 0; 0; 0.
//
// A warp takes a row, then the row a grid further. grid = any number of CTAs. A lane makes a word
// at a time, a warp 32 words, from the right end of the row to the left, so that what follows a
// word is at hand in the next lane or was kept from the step before. With F = m & (m >> 1), the
// bits whose right neighbour is on too, a run of n >= 2 has n - 1 bits in F, of which one is the
// last: |F| + |F & ~(m >> 2)| blocks are in runs.
//
//   dense, packed  A row may begin at any byte. Lanes read aligned 16 bytes (dense) or words
//                  (packed), make of them the row's bit stream, which begins `shift` bits early,
//                  and join each word of it with the next. What the first and the last read have of
//                  other rows is cut off; outside of the array nothing is read.
//   lists, csr     Lanes set bits of the row in shared memory with atomicOr, 8192 columns at a time
//                  (for a longer row, the list is read again). Columns that are out of range or
//                  come twice are left out and flagged, as are counts and offsets that do not fit.
//                  Entries for long rows, as of single keys, take 65,536 columns at a time.
//
// Sums are kept a warp, then a CTA, which adds its own to the scalars and waits for nobody. All are
// integers: no result depends on an order.
//
// Shared memory: 24 bytes a warp for the sums; lists and csr have 1 KB a warp for a row, or 8 KB.
//
// Expected on an H200, a prediction: 4.2 TB/s from HBM, 132 SMs that issue 4 a cycle at 1.75 GHz,
// 2.5 us of launch, first load and last sums in a chain. A dense step (1 KB of a row) is
// 2 loads, 5 instructions for 4 columns and about 105 in all; a row has 120 besides.
//
//     heads x rows x columns      8 x 900 x 900                8 x 3600 x 3600
//     dense    read + written     6.5 + 0.9 MB, 1.8 us         104 + 13 MB, 28 us
//              instructions       225 a row, 1.8 us            540 a row, 17 us, behind the loads
//              time               6 us                         32 us
//     packed   (50 a step)        1.7 MB, 170 a row: 5 us      26 MB, 320 a row: 13 us
//     lists, csr of 10 % (130 for 128 columns and 35 for 32 words)
//                                 3.5 MB, 290 a row: 6 us      54 MB, 660 a row: 24 us
//
// Entries for long rows, 57,600 single keys of 10 %: a row is 12 batches of reads and atomics, 14
// us, and 3 us for its words; 3,168 rows are at work, so 8 x 450 rows take 35 us (109 MB), 8 x 900
// take 55 (218 MB).
#pragma once

#include "common/builders.cuh"
#include "common/types.cuh"

namespace tessera {

enum class MaskFormat { kDense, kPacked, kLists, kCsr };

// Sums of one warp's rows.
struct MaskSums {
  u64 nnz;
  u64 in_runs;
  u32 errors;
};

struct MaskStateParams {
  const void* values;  // dense: u8, 0 or not; packed: u8, 8 columns a byte; lists, csr: columns
  const void* bounds;  // lists: columns of each row that count; csr: offsets, rows + 1
  i64 stride;          // from a row of values to the next, in elements; csr: unused
  i64 width;           // lists: columns that a row has room for; csr: length of values
  u32* bitmap;
  i32* row_count;
  i64* scalars;
  i32 rows;
  i32 nk;
  i32 wide_values;  // 1: columns are i64, 0: i32
  i32 wide_bounds;  // the same of counts and offsets
};

// Words of a row that are built in shared memory at a time, and columns that a lane has in flight.
template <bool kLong>
inline constexpr int kWordsOfPass = kLong ? 2048 : 256;
template <bool kLong>
inline constexpr int kColumnsOfLane = kLong ? 16 : 4;
inline constexpr i64 kLongestList = 1 << 30;

template <bool kListed, int kWarps, bool kLong>
struct MaskRows {
  u32 word[kWarps][kWordsOfPass<kLong>];
};
template <int kWarps, bool kLong>
struct MaskRows<false, kWarps, kLong> {};

template <MaskFormat kFormat, int kWarps, bool kLong>
struct MaskStateStorage
    : MaskRows<kFormat == MaskFormat::kLists || kFormat == MaskFormat::kCsr, kWarps, kLong> {
  MaskSums sums[kWarps];
};

// For each byte that is not 0, a bit; the byte of the lowest address in the lowest bit.
__device__ __forceinline__ u32 nonzero_bytes(uint4 bytes) {
  const u32 words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
  u32 bits = 0;
#pragma unroll
  for (int i = 3; i >= 0; --i) {
    // The top bit of each byte, then the four of them moved to bits 28 to 31; no two products meet.
    const u32 tops = (((words[i] & 0x7f7f7f7fu) + 0x7f7f7f7fu) | words[i]) & 0x80808080u;
    bits = __funnelshift_l(tops * 0x00204081u, bits, 4);
  }
  return bits;
}

template <typename T>
__device__ __forceinline__ T read(u64 address) {
  return __ldg(reinterpret_cast<const T*>(address));
}

// The last `columns` bits of a word are off: all where there are 32 or more, none where there are
// less than 1.
__device__ __forceinline__ u32 without_last(int columns) {
  return __funnelshift_rc(~0u, 0u, max(columns, 0));
}

template <MaskFormat kFormat, int kWarps, bool kLong>
class MaskState {
 public:
  __device__ __forceinline__ MaskState(const MaskStateParams& params,
                                       MaskStateStorage<kFormat, kWarps, kLong>& shared)
      : p(params),
        smem(shared),
        lane(threadIdx.x & 31),
        warp(threadIdx.x >> 5),
        words((params.nk + 31) / 32) {}

  __device__ __forceinline__ void run() {
    if constexpr (kListed) {
      for (int word = lane; word < kPassWords; word += 32) smem.word[warp][word] = 0;
      __syncwarp();
    }
    MaskSums& sums = smem.sums[warp];
    if (lane == 0) sums = {0, 0, 0};
    for (int row = blockIdx.x * kWarps + warp; row < p.rows; row += gridDim.x * kWarps) {
      out = p.bitmap + static_cast<i64>(row) * words;
      count = in_runs = after = 0;
      if constexpr (kListed) {
        listed_row(row);
      } else {
        stream_row(row);
      }
      const u32 total = __reduce_add_sync(kAllLanes, count);
      const u32 total_in_runs = __reduce_add_sync(kAllLanes, in_runs);
      if (lane == 0) {
        p.row_count[row] = total;
        // In shared memory, since registers are what bounds the rows at work.
        sums.nnz += total;
        sums.in_runs += total_in_runs;
      }
    }
    errors = __reduce_or_sync(kAllLanes, errors);
    if (lane == 0) sums.errors = errors;
    finish();
  }

 private:
  static constexpr bool kListed = kFormat == MaskFormat::kLists || kFormat == MaskFormat::kCsr;
  static constexpr bool kDense = kFormat == MaskFormat::kDense;
  static constexpr int kPassWords = kWordsOfPass<kLong>;
  static constexpr int kListBatch = kColumnsOfLane<kLong>;
  static constexpr int kRead = kDense ? 16 : 4;      // bytes that a lane reads at a time
  static constexpr int kStep = kDense ? 1024 : 128;  // bytes that become 32 words

  // Lane 31's neighbour is lane 0 of the 32 words to the right, which come first.
  __device__ __forceinline__ u32 following(u32 word, u32& kept) const {
    const u32 next = __shfl_sync(kAllLanes, word, lane + 1);  // modulo 32
    const u32 result = lane == 31 ? kept : next;
    kept = next;
    return result;
  }

  // Takes 32 words of the row; those past its end are 0 already.
  __device__ __forceinline__ void take(u32 word, int index) {
    const u32 next = following(word, after);
    const u32 pairs = word & __funnelshift_r(word, next, 1);
    count += __popc(word);
    in_runs += __popc(pairs) + __popc(pairs & ~__funnelshift_r(word, next, 2));
    if (index < words) out[index] = word;
  }

  // A row of dense or packed.
  __device__ __forceinline__ void stream_row(int row) {
    if (p.nk == 0) return;
    const u64 values = reinterpret_cast<u64>(p.values);
    const int bytes = kDense ? p.nk : (p.nk + 7) / 8;
    const u64 start = values + row * p.stride;
    const int skipped = static_cast<int>(start & (kRead - 1));
    const u64 aligned = start - skipped;
    const u64 end = values + (p.rows - 1) * p.stride + bytes;
    const int reach = (skipped + bytes + kRead - 1) & -kRead;
    if (aligned >= values && aligned + reach <= end) {
      stream_row<true>(aligned, skipped, bytes, values, end);
    } else {
      stream_row<false>(aligned, skipped, bytes, values, end);
    }
  }

  // kInner: all that the row's reads reach is within the array.
  template <bool kInner>
  __device__ __forceinline__ void stream_row(u64 aligned, int skipped, int bytes, u64 begin,
                                             u64 end) {
    const int shift = kDense ? skipped : 8 * skipped;
    const int steps = (skipped + bytes - 1) / kStep;
    int index = 32 * steps + lane;
    int left = skipped + bytes - kStep * steps - kRead * lane;
    u64 address = aligned + kStep * steps + kRead * lane;
    u32 stream_after = 0;
#pragma unroll 1
    for (; index >= 0; index -= 32) {
      const u32 stream = fetch<kInner>(address, left, begin, end);
      u32 word = __funnelshift_r(stream, following(stream, stream_after), shift);
      const int past = 32 * index + 32 - p.nk;
      if constexpr (!kDense) {
        word &= without_last(32 * index + 32 - 8 * bytes);
        if ((word & ~without_last(past)) != 0) errors |= kOutOfRange;
      }
      take(word & without_last(past), index);
      address -= kStep;
      left += kStep;
    }
  }

  // The lane's word of the stream; `left` bytes of the row lie at and after its address.
  template <bool kInner>
  __device__ __forceinline__ u32 fetch(u64 address, int left, u64 begin, u64 end) const {
    if constexpr (!kDense) {
      return left > 0 ? aligned_word<kInner>(address, begin, end) : 0;
    } else {
      u32 both;
      if constexpr (kInner) {
        uint4 low = make_uint4(0, 0, 0, 0);
        uint4 high = low;
        if (left > 0) low = read<uint4>(address);
        if (left > kStep / 2) high = read<uint4>(address + kStep / 2);
        both = nonzero_bytes(low) | nonzero_bytes(high) << 16;
      } else {
        both = left > 0 ? sixteen(address, begin, end) : 0;
        if (left > kStep / 2) both |= sixteen(address + kStep / 2, begin, end) << 16;
      }
      // Lane i has bits 16 i and 512 + 16 i of the stream; it is to have word i.
      const u32 even = __shfl_sync(kAllLanes, both, 2 * lane);  // modulo 32
      const u32 odd = __shfl_sync(kAllLanes, both, 2 * lane + 1);
      return lane < 16 ? (even & 0xffffu) | odd << 16 : even >> 16 | (odd & 0xffff0000u);
    }
  }

  template <bool kInner>
  static __device__ __forceinline__ u32 aligned_word(u64 address, u64 begin, u64 end) {
    if (kInner || (address >= begin && address + 4 <= end)) return read<u32>(address);
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (address + i >= begin && address + i < end) word |= read<u8>(address + i) << (8 * i);
    }
    return word;
  }

  // Bits of 16 bytes, of which some may lie outside of the array.
  static __device__ __forceinline__ u32 sixteen(u64 address, u64 begin, u64 end) {
    if (address >= begin && address + 16 <= end) return nonzero_bytes(read<uint4>(address));
    return nonzero_bytes(make_uint4(aligned_word<false>(address, begin, end),
                                    aligned_word<false>(address + 4, begin, end),
                                    aligned_word<false>(address + 8, begin, end),
                                    aligned_word<false>(address + 12, begin, end)));
  }

  __device__ __forceinline__ void listed_row(int row) {
    i64 begin = 0;
    i64 given;
    i64 room = p.width;
    if constexpr (kFormat == MaskFormat::kLists) {
      begin = row * p.stride;
      given = integer(p.bounds, row, p.wide_bounds);
    } else {
      const i64 offset = integer(p.bounds, row, p.wide_bounds);
      begin = max(0ll, min(offset, p.width));
      if (begin != offset || (row == 0 && begin != 0)) errors |= kBadCount;
      const i64 end = integer(p.bounds, row + 1, p.wide_bounds);
      if (row == p.rows - 1 && end != p.width) errors |= kBadCount;
      given = end - begin;
      room -= begin;
    }
    const u8* const columns = static_cast<const u8*>(p.values) + begin * (p.wide_values ? 8 : 4);
    const int length = static_cast<int>(max(0ll, min(given, min(room, kLongestList))));
    if (length != given) errors |= kBadCount;
    u32* const bits = smem.word[warp];
    for (int first = max(words - 1, 0) & -kPassWords; first >= 0; first -= kPassWords) {
      const u32 inside = min(p.nk - 32 * first, 32 * kPassWords);
      for (int i = lane; i < length; i += 32 * kListBatch) {
        i32 column[kListBatch];
#pragma unroll
        for (int j = 0; j < kListBatch; ++j) {
          // A lane without a column takes its first again, which is then skipped.
          const int at = i + 32 * j;
          column[j] = column_of(columns, at < length ? at : i);
        }
        if constexpr (kLong) {
          set_bits(bits, column, length - i, first, inside);
        } else {
#pragma unroll
          for (int j = 0; j < kListBatch; ++j) {
            if (i + 32 * j < length) set_bit(bits, column[j], first, inside);
          }
        }
      }
      __syncwarp();
#pragma unroll 1
      for (int group = (min(kPassWords, words - first) - 1) & -32; group >= 0; group -= 32) {
        const u32 word = bits[group + lane];
        bits[group + lane] = 0;
        take(word, first + group + lane);
      }
      __syncwarp();
    }
  }

  // An entry of a list; one that i32 does not hold is out of range anyhow.
  __device__ __forceinline__ i32 column_of(const u8* columns, int at) const {
    if (!p.wide_values) return __ldg(reinterpret_cast<const i32*>(columns) + at);
    const i64 column = __ldg(reinterpret_cast<const i64*>(columns) + at);
    return column == static_cast<i32>(column) ? static_cast<i32>(column) : -1;
  }

  __device__ __forceinline__ void set_bit(u32* bits, i32 column, int first, u32 inside) {
    const u32 local = static_cast<u32>(column) - 32u * first;
    if (local < inside) {
      const u32 bit = 1u << (local & 31);
      if ((atomicOr(bits + local / 32, bit) & bit) != 0) errors |= kDuplicate;
    } else if (static_cast<u32>(column) >= static_cast<u32>(p.nk)) {
      errors |= kOutOfRange;
    }
  }

  // The same of the columns of a batch, of which `left` lie from the lane's first on: no bit waits
  // for what was there before another.
  __device__ __forceinline__ void set_bits(u32* bits, const i32 (&columns)[kListBatch], int left,
                                           int first, u32 inside) {
    u32 before[kListBatch];
    bool outside = false;
#pragma unroll
    for (int j = 0; j < kListBatch; ++j) {
      const u32 local = static_cast<u32>(columns[j]) - 32u * first;
      const bool listed = 32 * j < left;
      const bool here = listed && local < inside;
      // Without a branch: nothing is added to the first word.
      before[j] = atomicOr(bits + (here ? local / 32 : 0), here ? 1u << (local & 31) : 0);
      before[j] = here ? before[j] : 0;
      outside |= listed && static_cast<u32>(columns[j]) >= static_cast<u32>(p.nk);
    }
    u32 again = 0;
#pragma unroll
    for (int j = 0; j < kListBatch; ++j) again |= before[j] & 1u << (columns[j] & 31);
    if (again != 0) errors |= kDuplicate;
    if (outside) errors |= kOutOfRange;
  }

  __device__ __forceinline__ void finish() {
    __syncthreads();
    if (warp != 0) return;
    const MaskSums mine = lane < kWarps ? smem.sums[lane] : MaskSums{0, 0, 0};
    const i64 nnz = warp_total(static_cast<i64>(mine.nnz));
    const i64 in_runs_too = warp_total(static_cast<i64>(mine.in_runs));
    const u32 found = __reduce_or_sync(kAllLanes, mine.errors);
    if (lane != 0) return;
    u64* const scalars = reinterpret_cast<u64*>(p.scalars);
    if (nnz != 0) atomicAdd(scalars + kNnz, static_cast<u64>(nnz));
    if (in_runs_too != 0) atomicAdd(scalars + kInRuns, static_cast<u64>(in_runs_too));
    if (found != 0) atomicOr(scalars + kErrors, static_cast<u64>(found));
  }

  const MaskStateParams& p;
  MaskStateStorage<kFormat, kWarps, kLong>& smem;
  const int lane;
  const int warp;
  const int words;
  u32* out;        // of the row
  u32 count;       // columns that are on, of the lane's words
  u32 in_runs;     // of them, those in runs
  u32 after;       // lane 31's: the word that follows its next one
  u32 errors = 0;  // of all rows
};

template <MaskFormat kFormat, int kWarps, bool kLong>
__device__ __forceinline__ void mask_state(const MaskStateParams& params) {
  using Storage = MaskStateStorage<kFormat, kWarps, kLong>;
  extern __shared__ __align__(1024) u8 dynamic_smem[];
  MaskState<kFormat, kWarps, kLong>(params, *reinterpret_cast<Storage*>(dynamic_smem)).run();
}

}  // namespace tessera

// The one entry of a specialisation.
#define TESSERA_MASK_STATE(FORMAT, WARPS, MIN_CTAS, LONG)                   \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)        \
      mask_state(const __grid_constant__ tessera::MaskStateParams params) { \
    tessera::mask_state<tessera::MaskFormat::FORMAT, WARPS, LONG>(params);  \
  }
