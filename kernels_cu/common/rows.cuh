// Rows of numbers, of which the highest are kept: a warp a row, or a whole CTA a long one.
//
// Numbers become keys, u32 in the same order; 0 lies below all that counts and fills a row up. A
// warp has a stretch of neighbouring columns, a lane each 32nd of it, with the first kHeld of a
// lane in registers; further ones are read again. What is asked of a whole row (how many keys are
// not below another, what they sum to) is a sum over lanes and then over warps, in a fixed order.
//
// The boundary is found bit by bit from the first one in which keys differ, which takes as many
// steps as there are such bits, or less where a boundary separates just as many as are asked for.
#pragma once

#include "common/types.cuh"

namespace tessera {

inline constexpr int kHeld = 32;
// Of a row that one warp takes. It reads up to half as many again as it holds in each step, from
// L1: that costs less than a barrier of the CTA in each.
inline constexpr int kWarpColumns = 48 * kHeld;

// A key of a float: rising as it does; NaN is minus infinity, and zeros are equal.
__device__ __forceinline__ u32 ordered(float value) {
  u32 bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) bits = 0xff800000u;
  if ((bits & 0x7fffffffu) == 0) bits = 0;
  return bits ^ (static_cast<u32>(static_cast<i32>(bits) >> 31) | 0x80000000u);
}

__device__ __forceinline__ float unordered(u32 key) {
  return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu));
}

// What warps tell each other, in turns, so that one barrier is enough.
template <int kWarps>
struct RowExchange {
  u32 word[2][kWarps];
};

// The keys that are kept: those above `level`, and the first `ties` of those at it.
struct Boundary {
  u32 level;
  int ties;
};

// kWide: a row of the whole CTA. kWarps: of the CTA.
template <int kWarps, bool kWide>
class Row {
 public:
  __device__ __forceinline__ Row(RowExchange<kWarps>& shared, int columns_of_row)
      : exchange(shared),
        lane(threadIdx.x & 31),
        part(kWide ? threadIdx.x >> 5 : 0),
        columns(columns_of_row),
        span(kWide ? (columns_of_row + 32 * kWarps - 1) / (32 * kWarps) * 32
                   : (columns_of_row + 31) / 32 * 32),
        left(min(columns_of_row - part * span, span) - lane) {}

  // The lane's first column; its others follow, 32 apart.
  __device__ __forceinline__ int first() const { return part * span + lane; }

  // Takes a row; of(32 * i) gives the key of the lane's column i. Past kHeld it is asked again.
  template <typename Of>
  __device__ __forceinline__ void hold(Of of) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) key[i] = 32 * i < left ? of(32 * i) : 0;
  }

  // Calls visit(key, 32 * i, whether there is such a column) for each column i of the lane; all
  // lanes of a warp as often.
  template <typename Of, typename Visit>
  __device__ __forceinline__ void each(Of of, Visit visit) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (32 * i >= span) break;
      visit(key[i], 32 * i, 32 * i < left);
    }
#pragma unroll 4
    for (int at = 32 * kHeld; at < span; at += 32) visit(at < left ? of(at) : 0, at, at < left);
  }

  template <typename Of>
  __device__ __forceinline__ u32 count_from(Of of, u32 level) {
    u32 count = 0;
    each(of, [&](u32 own, int, bool) { count += own >= level; });
    return whole(__reduce_add_sync(~0u, count), [](u32 a, u32 b) { return a + b; });
  }

  // Sum of the keys from a level on, as the float32 that they are the bits of.
  template <typename Of>
  __device__ __forceinline__ float sum_from(Of of, u32 level) {
    float sum = 0.0f;
    each(of, [&](u32 own, int, bool) { sum += own >= level ? __uint_as_float(own) : 0.0f; });
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
    return __uint_as_float(whole(__float_as_uint(sum), [](u32 a, u32 b) {
      return __float_as_uint(__uint_as_float(a) + __uint_as_float(b));
    }));
  }

  // The smallest and the largest key.
  template <typename Of>
  __device__ __forceinline__ uint2 range(Of of) {
    u32 low = ~0u;
    u32 high = 0;
    each(of, [&](u32 own, int, bool there) {
      if (there) low = min(low, own);
      high = max(high, own);
    });
    low = whole(__reduce_min_sync(~0u, low), [](u32 a, u32 b) { return min(a, b); });
    high = whole(__reduce_max_sync(~0u, high), [](u32 a, u32 b) { return max(a, b); });
    return make_uint2(low, high);
  }

  // The largest level for which `enough(level)` holds, or one between the same keys: of levels,
  // those up to a certain one are enough. kDone ends the search.
  enum Answer { kLess, kEnough, kDone };
  template <typename Enough>
  __device__ __forceinline__ u32 search(uint2 keys, bool& done, Enough enough) {
    int bits = 32 - __clz(static_cast<int>(keys.x ^ keys.y));
    u32 level = bits == 32 ? 0 : keys.y >> bits << bits;
    done = false;
#pragma unroll 1
    while (bits > 0) {
      const u32 candidate = level | 1u << --bits;
      const Answer answer = enough(candidate);
      if (answer == kLess) continue;
      level = candidate;
      if (answer == kDone) {
        done = true;
        break;
      }
    }
    return level;
  }

  // The boundary of the `count` highest, 1 to the number of columns.
  template <typename Of>
  __device__ __forceinline__ Boundary highest(Of of, uint2 keys, u32 count) {
    bool done;
    const u32 level = search(keys, done, [&](u32 candidate) {
      const u32 found = count_from(of, candidate);
      return found < count ? kLess : found == count ? kDone : kEnough;
    });
    if (done) return {level, columns};
    return {level, static_cast<int>(count - count_from(of, level + 1))};
  }

  // Writes for each column whether it is kept, or is to be anyhow.
  // Pointers are to the lane's first column.
  template <typename Of>
  __device__ __forceinline__ void write(Of of, Boundary boundary, u8* out, const u8* always) {
    int before = 0;  // keys at the level in columns that come first
    if constexpr (kWide) {
      u32 level_keys = 0;
      each(of, [&](u32 own, int, bool there) { level_keys += there && own == boundary.level; });
      const u32 own_keys = __reduce_add_sync(~0u, level_keys);
      u32* const word = next();
      if (lane == 0) word[part] = own_keys;
      __syncthreads();
      for (int other = 0; other < part; ++other) before += word[other];
    }
    each(of, [&](u32 own, int at, bool there) {
      const bool level = there && own == boundary.level;
      const u32 peers = __ballot_sync(~0u, level);
      const int rank = before + __popc(peers & ((1u << lane) - 1));
      before += __popc(peers);
      if (!there) return;
      const bool kept = own > boundary.level || (level && rank < boundary.ties);
      out[at] = kept || (always != nullptr && __ldg(always + at) != 0);
    });
  }

 private:
  __device__ __forceinline__ u32* next() {
    turn ^= 1;
    return exchange.word[turn];
  }

  // Of a warp's value the row's.
  template <typename Combine>
  __device__ __forceinline__ u32 whole(u32 value, Combine combine) {
    if constexpr (kWide) {
      u32* const word = next();
      if (lane == 0) word[part] = value;
      __syncthreads();
      value = word[0];
#pragma unroll
      for (int other = 1; other < kWarps; ++other) value = combine(value, word[other]);
    }
    return value;
  }

  RowExchange<kWarps>& exchange;
  const int lane;
  const int part;
  const int columns;
  const int span;
  const int left;  // columns from the lane's first one to the end of its warp's
  int turn = 0;
  u32 key[kHeld];
};

}  // namespace tessera
