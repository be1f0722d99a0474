// Of each row of float16 bounds (key_bounds.cu) the `count` largest, exactly, ties to the lower
// key, or all from a level on; and what is kept anyhow. NaN is never kept for its bound. The result
// is a map with a bit for each key, as mask_state.cu reads it:
//
//   bits  u32 [rows][words_pitch]: bit j % 32 of word j / 32 is key j; bits past the tokens are 0
//
// A CTA takes a row, which it holds in shared memory, if it fits there, or reads again each time.
// Bounds are compared and counted in pairs, as tensors of two halves: two instructions for two keys
// and a level. The level of the last key that is kept is between one that enough bounds reach and a
// higher one that too few do. A counting tries two levels between them, on both sides of where the
// level would be if bounds were spread evenly; or thirds, if the one before did not halve what is
// left. Bounds of most rows are spread evenly where the level is, so that four or five countings
// are enough.
//
// Then a thread makes words of 32 keys, whose ties are counted over all lower keys.
// Shared memory: a row, and a few words a warp.
//
// Expected on an H200, a prediction, for 900 rows x 57,600 keys x 8 heads: rows of 115 KB, two a
// multiprocessor; 830 MB read, 0.2 ms. A counting takes 900 cycles of shared memory and as many of
// instructions, and there are 5 of them with the extremes; words take 1,600: 55 rows of 6,500
// cycles one after another are 0.2 ms, mostly beside the reads of the other CTA's row.
#pragma once

#include "common/ptx.cuh"
#include "common/scan.cuh"
#include "common/types.cuh"

namespace tessera {

struct KeepKeysParams {
  const u16* bounds;  // (rows, pitch) float16
  u32* bits;          // (rows, words_pitch)
  i32 rows_of_head;
  i32 tokens;
  i32 pitch;  // a multiple of 32
  i32 words_pitch;
  i32 begin;  // keys from here to `end` compete; the others are kept
  i32 end;
  i32 full_begin;  // rows of a head from here to `full_end` keep all keys
  i32 full_end;
  i32 count;  // keys that compete and are kept, at least 1; 0: those from `level` on
  i32 level;  // float16
  i32 held;   // 1: a row fits into shared memory
};

// A key of a float16: rising as it does, and zeros are equal.
__device__ __forceinline__ int rank_of(u32 half) {
  if ((half & 0x7fffu) == 0) half = 0;
  return static_cast<int>(half & 0x8000u ? half ^ 0xffffu : half ^ 0x8000u);
}
__device__ __forceinline__ u32 half_of(int rank) {
  return static_cast<u32>(rank & 0x8000 ? rank ^ 0x8000 : rank ^ 0xffff);
}

// Bits 0 to n - 1.
__device__ __forceinline__ u32 first_bits(int n) {
  return n >= 32 ? ~0u : n <= 0 ? 0u : (1u << n) - 1;
}

// Bits 0 to 15 become the even ones, 16 to 31 the odd ones.
__device__ __forceinline__ u32 interleaved(u32 x) {
  u32 moved = (x ^ (x >> 8)) & 0x0000ff00u;
  x ^= moved ^ (moved << 8);
  moved = (x ^ (x >> 4)) & 0x00f000f0u;
  x ^= moved ^ (moved << 4);
  moved = (x ^ (x >> 2)) & 0x0c0c0c0cu;
  x ^= moved ^ (moved << 2);
  moved = (x ^ (x >> 1)) & 0x22222222u;
  return x ^ moved ^ (moved << 1);
}

// What warps tell each other, in turns, so that one barrier is enough. The row lies behind it.
template <int kWarps>
struct KeyExchange {
  u32 word[2][2][kWarps];
  i32 totals[2][kWarps];
};

template <int kWarps, bool kHeld>
class KeyRow {
 public:
  __device__ __forceinline__ KeyRow(const KeepKeysParams& params, u8* memory)
      : p(params),
        exchange(*reinterpret_cast<KeyExchange<kWarps>*>(memory)),
        held(memory + sizeof(KeyExchange<kWarps>)),
        row(params.bounds + static_cast<i64>(blockIdx.x) * params.pitch) {}

  __device__ __forceinline__ void run() {
    const int of_head = blockIdx.x % static_cast<u32>(p.rows_of_head);
    if (of_head >= p.full_begin && of_head < p.full_end) {
      for (int word = threadIdx.x; word < words(); word += kThreads) put(word, ~0u);
      return;
    }
    if constexpr (kHeld) {
      const u32 base = smem_address(held);
      const u64 from = reinterpret_cast<u64>(row);
      for (int i = threadIdx.x; i < p.pitch / 8; i += kThreads)
        cp_async16(base + 16 * i, from + 16 * static_cast<u64>(i), true);
      cp_async_commit();
      cp_async_wait<0>();
      __syncthreads();
    }
    u32 level = static_cast<u32>(p.level);
    i32 ties = kAll;
    if (p.count > 0) search(level, ties);
    write(level, ties);
  }

 private:
  static constexpr int kThreads = 32 * kWarps;
  static constexpr i32 kAll = 0x7fffffff;
  static constexpr u32 kMinus = 0xfc00u;  // minus infinity
  static constexpr u32 kPlus = 0x7c00u;

  __device__ __forceinline__ int words() const { return (p.tokens + 31) / 32; }

  // Eight bounds.
  __device__ __forceinline__ uint4 chunk(int index) const {
    if constexpr (kHeld) return reinterpret_cast<const uint4*>(held)[index];
    return __ldg(reinterpret_cast<const uint4*>(row) + index);
  }

  // Of the warps' two values each the CTA's.
  template <typename First, typename Second>
  __device__ __forceinline__ uint2 whole(u32 first, u32 second, First one, Second other) {
    u32(*const word)[kWarps] = exchange.word[turn ^= 1];
    if ((threadIdx.x & 31) == 0) {
      word[0][threadIdx.x >> 5] = first;
      word[1][threadIdx.x >> 5] = second;
    }
    __syncthreads();
    uint2 result = make_uint2(word[0][0], word[1][0]);
#pragma unroll
    for (int w = 1; w < kWarps; ++w) {
      result.x = one(result.x, word[0][w]);
      result.y = other(result.y, word[1][w]);
    }
    return result;
  }

  // The sum of a warp's pairs of halves.
  static __device__ __forceinline__ u32 total(const u32 (&halves)[4]) {
    i32 count = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      count += static_cast<i32>(half_to_float(halves[i] & 0xffffu)) +
               static_cast<i32>(half_to_float(halves[i] >> 16));
    return static_cast<u32>(__reduce_add_sync(kAllLanes, count));
  }

  // How many reach either level.
  __device__ __forceinline__ int2 count_from(int lower, int higher) {
    const u32 low = half_of(lower) * 0x10001u;
    const u32 high = half_of(higher) * 0x10001u;
    u32 of_low[4] = {};  // as halves, exact up to 2,048
    u32 of_high[4] = {};
    for (int i = threadIdx.x; i < p.pitch / 8; i += kThreads) {
      const uint4 keys = chunk(i);
      const u32 pairs[4] = {keys.x, keys.y, keys.z, keys.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        of_low[j] = add_halves(of_low[j], halves_from(pairs[j], low));
        of_high[j] = add_halves(of_high[j], halves_from(pairs[j], high));
      }
    }
    auto sum = [](u32 a, u32 b) { return a + b; };
    const uint2 found = whole(total(of_low), total(of_high), sum, sum);
    return make_int2(static_cast<int>(found.x), static_cast<int>(found.y));
  }

  // The level of the last key that is kept, and how many of those at it are.
  __device__ __forceinline__ void search(u32& level, i32& ties) {
    u32 smallest = kPlus * 0x10001u;
    u32 largest = kMinus * 0x10001u;
    for (int i = threadIdx.x; i < p.pitch / 8; i += kThreads) {
      const uint4 keys = chunk(i);
      smallest = min2<half_t>(
          smallest, min2<half_t>(min2<half_t>(keys.x, keys.y), min2<half_t>(keys.z, keys.w)));
      largest = max2<half_t>(
          largest, max2<half_t>(max2<half_t>(keys.x, keys.y), max2<half_t>(keys.z, keys.w)));
    }
    const int least = min(rank_of(smallest & 0xffffu), rank_of(smallest >> 16));
    const int most = max(rank_of(largest & 0xffffu), rank_of(largest >> 16));
    const uint2 range = whole(
        __reduce_min_sync(kAllLanes, static_cast<u32>(least)),
        __reduce_max_sync(kAllLanes, static_cast<u32>(most)),
        [](u32 a, u32 b) { return min(a, b); }, [](u32 a, u32 b) { return max(a, b); });
    // Enough reach `low`, too few `high`.
    int low = static_cast<int>(range.x);
    int high = static_cast<int>(range.y) + 1;
    i32 of_low = p.end - p.begin;
    i32 of_high = 0;
    bool halved = true;
#pragma unroll 1
    while (high - low > 1 && of_low > p.count) {
      const int between = high - low;
      int first = between / 3;
      int second = 2 * between / 3;
      if (halved) {
        const float part =
            __fdiv_rn(static_cast<float>(of_low - p.count), static_cast<float>(of_low - of_high));
        const int guess = static_cast<int>(part * static_cast<float>(between));
        const int beside = max(1, between / 12);
        first = guess - beside;
        second = guess + beside;
      }
      first = low + max(1, min(first, between - 1));
      second = low + max(1, min(second, between - 1));
      const int2 found = count_from(first, second);
      if (found.y >= p.count) {
        low = second;
        of_low = found.y;
      } else {
        high = second;
        of_high = found.y;
        if (found.x >= p.count) {
          low = first;
          of_low = found.x;
        } else {
          high = first;
          of_high = found.x;
        }
      }
      halved = 2 * (high - low) <= between;
    }
    level = half_of(low);
    ties = of_low <= p.count ? kAll : p.count - of_high;
  }

  // All words of the row, of the keys above the level and the first of those at it.
  __device__ __forceinline__ void write(u32 level, i32 ties) {
    const u32 both = level * 0x10001u;
    i32 before = 0;
    int round = 0;
#pragma unroll 1
    for (int first = 0; first < words(); first += kThreads, ++round) {
      const int word = first + threadIdx.x;
      u32 above = 0;
      u32 at = 0;
      if (word < words()) {
        // A lane's four chunks in an order in which eight lanes meet in no bank.
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int part = (i + (threadIdx.x >> 1)) & 3;
          const uint4 keys = chunk(4 * word + part);
          const u32 pairs[4] = {keys.x, keys.y, keys.z, keys.w};
          u32 greater = 0;
          u32 equal = 0;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            greater |= halves_above(pairs[j], both) & (0x10001u << j);
            equal |= halves_at(pairs[j], both) & (0x10001u << j);
          }
          above |= greater << (4 * part);
          at |= equal << (4 * part);
        }
        above = interleaved(above);
        at = interleaved(at);
      }
      if (ties != kAll) {
        i32* const of_warps = exchange.totals[round & 1];
        const i32 own = __popc(at);
        const i32 left = ties - before - sum_before<kWarps>(own, of_warps);
#pragma unroll
        for (int w = 0; w < kWarps; ++w) before += of_warps[w];
        if (left <= 0) {
          at = 0;
        } else if (left < own) {
          u32 kept = 0;
          for (i32 i = 0; i < left; ++i) {
            const u32 lowest = at & (~at + 1);
            kept |= lowest;
            at ^= lowest;
          }
          at = kept;
        }
      }
      if (word < words()) put(word, above | at);
    }
  }

  // A word with what is kept anyhow.
  __device__ __forceinline__ void put(int word, u32 kept) const {
    const int first = 32 * word;
    const u32 competing = first_bits(p.end - first) & ~first_bits(p.begin - first);
    p.bits[static_cast<i64>(blockIdx.x) * p.words_pitch + word] =
        (kept | ~competing) & first_bits(p.tokens - first);
  }

  const KeepKeysParams& p;
  KeyExchange<kWarps>& exchange;
  u8* const held;
  const u16* const row;
  int turn = 0;
};

template <int kWarps>
__device__ __forceinline__ void keep_keys(const KeepKeysParams& p) {
  extern __shared__ __align__(1024) u8 dynamic_smem[];
  if (p.held) {
    KeyRow<kWarps, true>(p, dynamic_smem).run();
  } else {
    KeyRow<kWarps, false>(p, dynamic_smem).run();
  }
}

}  // namespace tessera

// The one entry of a specialisation.
#define TESSERA_KEEP_KEYS(WARPS, MIN_CTAS)                                \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)      \
      keep_keys(const __grid_constant__ tessera::KeepKeysParams params) { \
    tessera::keep_keys<WARPS>(params);                                    \
  }
