// Of each row of float16 bounds (key_bounds.cu) or sums (column_sums.cu) the `count` largest,
// exactly, ties to the lower key, or all from a level on; what is kept anyhow; and others at
// random. NaN is never kept for its bound. The result is a map with a bit for each key, as
// mask_state.cu reads it:
//
//   bits  u32 [rows][words_pitch]: bit j % 32 of word j / 32 is key j; bits past the tokens are 0
//
// A key is drawn where its number in [0, 1), of 32 binary digits, is below the probability. For the
// 32 keys of a word, digit 4 i + n of all of them is the word n of Philox at the counter (word, row
// of the head, head, i): so two instructions a digit compare 32 keys, and after 12 digits, three
// calls, few are open.
//
// A CTA takes a row, which it holds in shared memory, if it fits there, or reads again each time.
// Bounds are compared and counted in pairs, as tensors of two halves: two instructions for two keys
// and a level. The level of the last key that is kept is between one that enough bounds reach and a
// higher one that too few do. A counting tries four levels between them.
//
// The first four span what a sample of 1,024 keys suggests, which every warp has in registers: four
// steps, in each of which every warp counts the sample from another level, give a level that the
// count's share and three standard deviations more of the sample reach, and one that as many fewer
// do. Later countings try levels around the one that would be it if bounds were spread evenly,
// which are neighbours in the end; or fifths, if the one before did not halve what is left. So two
// or three countings are enough for most rows (NOTES.md); a sample that misleads costs countings.
//
// Then a thread makes words of 32 keys, whose ties are counted over all lower keys.
// Shared memory: a row, and a few words a warp; two rows of 57,600 keys fit where there are 228 KB.
//
// Expected on an H200, a prediction, for 900 rows x 57,600 keys x 8 heads: rows of 115 KB, two a
// multiprocessor if the driver gives it all to shared memory (KernelConfig.needs_carveout); 830 MB
// read, 0.20 to 0.22 ms, 6,400 to 7,000 cycles a row. Instructions of a row on four schedulers: the
// sample 1,600 cycles, 2 or 3 countings 2,000 each, words 1,800, so 7,400 to 9,400, where 5 to 7
// countings of two levels at 1,200 and the extremes took 8,600 to 11,000. Beside the reads of the
// other CTA's row 0.25 to 0.32 ms; with one CTA a multiprocessor, whose 9,000 to 11,000 cycles with
// barriers follow its reads, 0.42 to 0.50. For Chipmunk's 2,400 rows of 8 heads, a third of these:
// 276 MB read, 0.09 to 0.12 ms, and for its random keys 3.3 calls of Philox a word, 3,600 cycles a
// row, 0.03 to 0.04 ms more.
#pragma once

#include "common/finite.cuh"
#include "common/philox.cuh"
#include "common/ptx.cuh"
#include "common/scan.cuh"
#include "common/types.cuh"

namespace tessera {

struct KeepKeysParams {
  const u16* bounds;  // rows of `tokens` float16, at multiples of 16 bytes
  u32* bits;          // (rows, words_pitch)
  i32 rows_of_head;
  i32 tokens;
  i32 pitch;  // from one row to the next, a multiple of 8
  i32 words_pitch;
  i32 begin;  // keys from here to `end` compete; the others are kept
  i32 end;
  i32 text_begin;  // those of them from here to `text_end` are kept anyhow
  i32 text_end;
  i32 full_begin;  // rows of a head from here to `full_end` keep all keys
  i32 full_end;
  i32 count;  // keys that compete and are kept, at least 1; 0: those from `level` on
  i32 level;  // float16
  i32 held;   // 1: a row fits into shared memory
  u32 drawn;  // 2^32 times the probability of a key, below 2^32
  u64 seed;
  i32* flag;  // set where a row holds NaN or infinities, or null
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
      for (int i = threadIdx.x; i < chunks(); i += kThreads) {
        if (i < p.tokens / 8) {
          cp_async16(base + 16 * i, from + 16 * static_cast<u64>(i), true);
        } else {
          reinterpret_cast<uint4*>(held)[i] = last_chunk(i);
        }
      }
      cp_async_commit();
      cp_async_wait<0>();
      __syncthreads();
    }
    if (p.flag != nullptr) look();
    u32 level = static_cast<u32>(p.level);
    i32 ties = kAll;
    if (p.count > 0) search(level, ties);
    write(level, ties);
  }

 private:
  static constexpr int kThreads = 32 * kWarps;
  static constexpr i32 kAll = 0x7fffffff;
  static constexpr int kPairs = 16;       // of a lane's sample
  static constexpr int kSteps = 4;        // of 9: from 63,490 levels to 10
  static constexpr u32 kMinus = 0xfc00u;  // minus infinity
  static constexpr u32 kPlus = 0x7c00u;

  static __device__ __forceinline__ int lane() { return threadIdx.x & 31; }
  static __device__ __forceinline__ int warp() { return threadIdx.x >> 5; }
  __device__ __forceinline__ int words() const { return (p.tokens + 31) / 32; }

  __device__ __forceinline__ int chunks() const { return 4 * words(); }

  // Eight bounds, NaN behind the tokens.
  __device__ __forceinline__ uint4 chunk(int index) const {
    if constexpr (kHeld) return reinterpret_cast<const uint4*>(held)[index];
    if (index >= p.tokens / 8) return last_chunk(index);
    return __ldg(reinterpret_cast<const uint4*>(row) + index);
  }

  // What makes NaN of those of a pair that are not among so many keys.
  static __device__ __forceinline__ u32 behind(int left) {
    return (left > 0 ? 0u : 0x7fffu) | (left > 1 ? 0u : 0x7fff0000u);
  }

  // A chunk that is not whole.
  __device__ __forceinline__ uint4 last_chunk(int index) const {
    const int left = p.tokens - 8 * index;
    uint4 keys = make_uint4(0, 0, 0, 0);
    if (left > 0) keys = __ldg(reinterpret_cast<const uint4*>(row) + index);
    keys.x |= behind(left);
    keys.y |= behind(left - 2);
    keys.z |= behind(left - 4);
    keys.w |= behind(left - 6);
    return keys;
  }

  // Keys 2 index and that plus 1, both below the tokens.
  __device__ __forceinline__ u32 pair(int index) const {
    if constexpr (kHeld) return reinterpret_cast<const u32*>(held)[index];
    return __ldg(reinterpret_cast<const u32*>(row) + index);
  }

  // Sets the flag if the row holds what is no number.
  __device__ __forceinline__ void look() const {
    bool found = false;
    for (int i = threadIdx.x; i < chunks(); i += kThreads) {
      const uint4 keys = chunk(i);
      const u32 pairs[4] = {keys.x, keys.y, keys.z, keys.w};
#pragma unroll
      for (int j = 0; j < 4; ++j)
        found = found || not_finite<half_t>(pairs[j] & ~behind(p.tokens - 8 * i - 2 * j));
    }
    if (found) *p.flag = 1;
  }

  // The sum of a pair of halves.
  static __device__ __forceinline__ u32 total(u32 halves) {
    return static_cast<u32>(half_to_float(halves & 0xffffu) + half_to_float(halves >> 16));
  }

  // How many reach each of the levels.
  __device__ __forceinline__ void count_from(const int (&levels)[4], i32 (&counts)[4]) {
    u32 from[4];
    u32 reach[4][2] = {};  // as halves, exact up to 2,048
#pragma unroll
    for (int i = 0; i < 4; ++i) from[i] = half_of(levels[i]) * 0x10001u;
#pragma unroll 2
    for (int i = threadIdx.x; i < chunks(); i += kThreads) {
      const uint4 keys = chunk(i);
      const u32 pairs[4] = {keys.x, keys.y, keys.z, keys.w};
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int level = 0; level < 4; ++level)
          reach[level][j & 1] = add_halves(reach[level][j & 1], halves_from(pairs[j], from[level]));
    }
    // Two counts a word: those of a warp are below 65,536.
    u32(*const word)[kWarps] = exchange.word[turn ^= 1];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      u32 own[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) own[j] = total(reach[2 * i + j][0]) + total(reach[2 * i + j][1]);
      const u32 both = __reduce_add_sync(kAllLanes, own[0] | own[1] << 16);
      if (lane() == 0) word[i][warp()] = both;
    }
    __syncthreads();
    static_assert(kWarps == 16, "half a warp reads a word of each");
    const u32 read = word[lane() / kWarps][lane() % kWarps];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      counts[i] = static_cast<i32>(__reduce_add_sync(
          kAllLanes, lane() / kWarps == i / 2 ? (i & 1 ? read >> 16 : read & 0xffffu) : 0u));
  }

  // The level of the last key that is kept, and how many of those at it are.
  __device__ __forceinline__ void search(u32& level, i32& ties) {
    // Enough reach `low`, too few `high`.
    int low = rank_of(kMinus);
    int high = rank_of(kPlus) + 1;
    i32 of_low = p.end - p.begin;
    i32 of_high = 0;
    int levels[4];
    int apart = 0;  // of the levels, the first of which is `first`
    int first = 0;
    if (of_low > p.count && p.tokens >= 64 * kPairs) {
      int past = high;
      first = low;
      bracket(first, past);
      apart = max(1, (past - first) / 3);
    }
#pragma unroll 1
    while (high - low > 1 && of_low > p.count) {
      const int between = high - low;
      if (apart == 0) {
        apart = max(1, between / 5);
        first = low + apart;
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) levels[i] = max(low + 1, min(first + i * apart, high - 1));
      i32 counts[4];
      count_from(levels, counts);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (counts[i] >= p.count) {
          low = levels[i];
          of_low = counts[i];
        }
      }
#pragma unroll
      for (int i = 3; i >= 0; --i) {
        if (counts[i] < p.count) {
          high = levels[i];
          of_high = counts[i];
        }
      }
      apart = 0;
      if (2 * (high - low) <= between) {
        const float part =
            __fdiv_rn(static_cast<float>(of_low - p.count), static_cast<float>(of_low - of_high));
        const int guess = low + static_cast<int>(part * static_cast<float>(high - low));
        apart = max(1, (high - low) / 24);
        first = guess - apart;
      }
    }
    level = half_of(low);
    ties = of_low <= p.count ? kAll : p.count - of_high;
  }

  // Levels that, by a sample, rather too many and rather too few keys reach.
  __device__ __forceinline__ void bracket(int& low, int& high) {
    constexpr int kLevels = kWarps / 2;
    // Pairs at even distances, an odd number of words apart; of each turn a little further, so that
    // they are not of one column of the video.
    const int apart = (p.tokens / (64 * kPairs) - 1) | 1;
    u32 sample[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
      sample[i] = pair((32 * i + lane()) * apart + i * apart / kPairs);
    auto count_sample = [&](u32 from) {
      u32 reach[2] = {};
#pragma unroll
      for (int i = 0; i < kPairs; ++i)
        reach[i & 1] = add_halves(reach[i & 1], halves_from(sample[i], from * 0x10001u));
      return static_cast<i32>(__reduce_add_sync(kAllLanes, total(add_halves(reach[0], reach[1]))));
    };
    const float share = __fdiv_rn(static_cast<float>(p.count), static_cast<float>(p.end - p.begin));
    const i32 numbers = count_sample(kMinus);
    const float wanted = share * static_cast<float>(numbers);
    const float beside = 3.0f * sqrtf(wanted * (1.0f - share)) + 2.0f;
    // The highest level that so many of the sample reach is at least `from` and below `past`.
    const i32 targets[2] = {static_cast<i32>(wanted + beside), static_cast<i32>(wanted - beside)};
    int from[2] = {low, low};
    int past[2] = {high, high};
    auto level = [&](int target, int i) {
      return from[target] + (past[target] - from[target]) * (i + 1) / (kLevels + 1);
    };
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
      i32* const counts = exchange.totals[step & 1];
      const i32 own =
          count_sample(half_of(warp() < kLevels ? level(0, warp()) : level(1, warp() - kLevels)));
      if (lane() == 0) counts[warp()] = own;
      __syncthreads();
      const u32 enough =
          __ballot_sync(kAllLanes, counts[lane() % kWarps] >=
                                       (lane() % kWarps < kLevels ? targets[0] : targets[1]));
#pragma unroll
      for (int target = 0; target < 2; ++target) {
        const int reached = __popc(enough >> target * kLevels & first_bits(kLevels));
        const int next = reached < kLevels ? level(target, reached) : past[target];
        if (reached > 0) from[target] = level(target, reached - 1);
        past[target] = next;
      }
    }
    // Of shares at the ends the sample says nothing.
    if (targets[0] <= numbers) low = from[0];
    if (targets[1] > 0) high = past[1];
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
      if (word < words()) put(word, above | at | (p.drawn != 0 ? drawn(word) : 0));
    }
  }

  // Which keys of a word are drawn.
  __device__ __forceinline__ u32 drawn(int word) const {
    const u32 head = blockIdx.x / static_cast<u32>(p.rows_of_head);
    const u32 of_head = blockIdx.x % static_cast<u32>(p.rows_of_head);
    u32 below = 0;
    u32 open = ~0u;  // keys whose digits are those of the probability so far
    u32 digits = p.drawn;
#pragma unroll 1
    for (int i = 0; i < 8 && open != 0; ++i) {
      const PhiloxNumbers numbers = philox(static_cast<u32>(word), of_head, head, i, p.seed);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const u32 digit = static_cast<u32>(static_cast<i32>(digits) >> 31);
        below |= open & ~numbers.word[n] & digit;
        open &= ~(numbers.word[n] ^ digit);
        digits <<= 1;
      }
    }
    return below;
  }

  // A word with what is kept anyhow.
  __device__ __forceinline__ void put(int word, u32 kept) const {
    const int first = 32 * word;
    const u32 competing = first_bits(p.end - first) & ~first_bits(p.begin - first);
    const u32 text = first_bits(p.text_end - first) & ~first_bits(p.text_begin - first);
    p.bits[static_cast<i64>(blockIdx.x) * p.words_pitch + word] =
        (kept | text | ~competing) & first_bits(p.tokens - first);
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

// The one entry of a specialisation. Two CTAs have registers, as shared memory has room for two
// rows that are not long.
#define TESSERA_KEEP_KEYS(WARPS, MIN_CTAS)                                \
  static_assert(MIN_CTAS == 1, "long rows leave room for one CTA");       \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, 2)             \
      keep_keys(const __grid_constant__ tessera::KeepKeysParams params) { \
    tessera::keep_keys<WARPS>(params);                                    \
  }
