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
// Bounds are compared in pairs, as tensors of two halves that become 1 or 0, which the tensor cores
// add up: four comparisons and a product count eight keys of each lane at a level. The level of the
// last key that is kept is between one that enough bounds reach and a higher one that too few do. A
// counting tries four levels between them.
//
// The first four span what a sample of 1,024 keys suggests, which every warp has in registers. From
// its least and its largest key on, steps in which warps count the sample from 16 levels give a
// level that the count's share and 2.5 standard deviations more of the sample reach, and one that
// as many fewer do: two steps, or four where zero is between. Later countings try levels around the
// one that would be it if bounds were spread evenly, which are neighbours in the end; or fifths, if
// the one before did not halve what is left. So two countings are enough for most rows (NOTES.md);
// a sample that misleads costs countings.
//
// A warp has neighbouring keys, and the last countings of its own and of all lower warps' keys say
// how many of those at the level it keeps: all or none, in all warps but one. So one comparison is
// enough for its words, whose bits the tensor cores put together as powers of two; only the one
// warp compares twice, and counts.
//
// Shared memory: counts of warps, and a row; two rows of 57,600 keys fit where there are 228 KB.
//
// Expected on an H200, a prediction, for 900 rows x 57,600 keys x 8 heads: rows of 115 KB, two a
// multiprocessor if the driver gives it all to shared memory (KernelConfig.needs_carveout); 830 MB
// read, 0.20 to 0.22 ms. Warp instructions of a row, counted in the machine code: copies 1,500, the
// sample 3,100, two countings 6,500 each, words 4,700, so 22,300, where 44,700 took 0.50 ms at 2.9
// a cycle: 8,900 cycles at 2.5, 0.26 to 0.32 ms. Eight warps and not 16, as each warp's 1,150
// beside its keys are 9,200 then and not 18,400.
//
// For Chipmunk's 2,400 rows of 8 heads, a third of these: 276 MB read, 0.09 to 0.11 ms, and for its
// random keys 3.3 calls of Philox a word, 3,600 cycles a row, 0.03 to 0.04 ms more.
#pragma once

#include "common/builders.cuh"
#include "common/finite.cuh"
#include "common/philox.cuh"
#include "common/ptx.cuh"
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
  i32* flag;         // set where a row holds NaN or infinities, or null
  i32 sample_more;   // of 1,024 keys, as many as reach a level that is rather too low,
  i32 sample_fewer;  // and one that is rather too high; above 1,024, or 0: there is none
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

// What warps tell each other, in turns, so that one barrier is enough. The row lies behind it.
template <int kWarps>
struct KeyExchange {
  i32 counts[2][4 * kWarps];
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
      const int whole = p.tokens / 8;
      u32 to = smem_address(held) + 16 * threadIdx.x;
      u64 from = reinterpret_cast<u64>(row) + 16 * threadIdx.x;
#pragma unroll 4
      for (int i = threadIdx.x; i < whole; i += kThreads) {
        cp_async16(to, from, true);
        to += 16 * kThreads;
        from += 16 * kThreads;
      }
      const int last = whole + static_cast<int>(threadIdx.x);
      if (last < chunks()) reinterpret_cast<uint4*>(held)[last] = last_chunk(last);
      cp_async_commit();
      cp_async_wait<0>();
      __syncthreads();
    }
    if (p.flag != nullptr) look();
    if (p.count > 0) {
      write(search());
    } else {
      write({static_cast<u32>(p.level), 0, kAll});
    }
  }

 private:
  static_assert(kWarps == 8 || kWarps == 16, "a lane reads counts of each eighth warp");
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kUnit = 256;  // keys that the lanes of a warp read at a time
  static constexpr i32 kAll = 0x7fffffff;
  static constexpr int kPairs = 16;       // of a lane's sample
  static constexpr int kSteps = 4;        // at most: of 9, from 63,490 levels to 10
  static constexpr int kClose = 10;       // levels
  static constexpr u32 kMinus = 0xfc00u;  // minus infinity
  static constexpr u32 kPlus = 0x7c00u;
  static constexpr u32 kOnes = 0x3c003c00u;

  // What a warp keeps of its keys.
  struct Cut {
    u32 from;   // keys from this level on,
    u32 above;  // but of those below this one
    i32 left;   // only so many; or all
  };

  static __device__ __forceinline__ int lane() { return threadIdx.x & 31; }
  static __device__ __forceinline__ int warp() { return threadIdx.x >> 5; }
  __device__ __forceinline__ int words() const { return (p.tokens + 31) / 32; }

  __device__ __forceinline__ int chunks() const { return 4 * words(); }

  // A warp has neighbouring units, from its edge to the next one. What is no whole unit at the end
  // of the row is the last warp's.
  __device__ __forceinline__ int edge(int warp) const { return warp * (chunks() / 32) / kWarps; }

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

  // c += for each column the sum of b where keys reach a level. Rows are 16 runs of 16 keys, in the
  // order of the tensor cores: of lane 4 r + t keys 0 to 3 in row r, and 4 to 7 in row r + 8.
  static __device__ __forceinline__ void add(float (&c)[4], uint4 keys, u32 from, u32 b0, u32 b1) {
    const u32 reach[4] = {halves_from(keys.x, from), halves_from(keys.z, from),
                          halves_from(keys.y, from), halves_from(keys.w, from)};
    mma_m16n8k16<half_t>(c, reach, b0, b1);
  }

  // How many of the warp's keys reach the level of lane % 4, which lanes 0 to 3 pass, in pairs.
  __device__ __forceinline__ i32 reached(u32 level) const {
    u32 from[4];
    float sums[4][4] = {};  // all columns are equal
#pragma unroll
    for (int i = 0; i < 4; ++i) from[i] = __shfl_sync(kAllLanes, level, i);
    auto count = [&](uint4 keys) {
#pragma unroll
      for (int i = 0; i < 4; ++i) add(sums[i], keys, from[i], kOnes, kOnes);
    };
    const int end = 32 * edge(warp() + 1) + lane();
#pragma unroll 4
    for (int at = 32 * edge(warp()) + lane(); at < end; at += 32) count(chunk(at));
    if (warp() == kWarps - 1 && chunks() % 32 != 0) {
      constexpr u32 kNone = 0x7fff7fffu;
      count(end < chunks() ? chunk(end) : make_uint4(kNone, kNone, kNone, kNone));
    }
    float sum = sums[0][0] + sums[0][2];
#pragma unroll
    for (int i = 1; i < 4; ++i)
      if ((lane() & 3) == i) sum = sums[i][0] + sums[i][2];
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2)
      sum += __shfl_xor_sync(kAllLanes, sum, distance);
    return static_cast<i32>(sum);
  }

  // A level, and how many keys reach it: of the row, of lower warps, of this warp.
  struct Counted {
    int level;
    i32 all;
    i32 before;
    i32 own;

    __device__ __forceinline__ Counted of_lane(int lane) const {
      return {__shfl_sync(kAllLanes, level, lane), __shfl_sync(kAllLanes, all, lane),
              __shfl_sync(kAllLanes, before, lane), __shfl_sync(kAllLanes, own, lane)};
    }
  };

  // Of the level of lane % 4.
  __device__ __forceinline__ Counted counted(int level) {
    Counted made{level, 0, 0, reached(half_of(level) * 0x10001u)};
    i32* const of_warps = exchange.counts[turn ^= 1];
    if (lane() < 4) of_warps[4 * warp() + lane()] = made.own;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kWarps / 8; ++i) {
      const i32 count = of_warps[32 * i + lane()];
      made.all += count;
      if (8 * i + lane() / 4 < warp()) made.before += count;
    }
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
      made.all += __shfl_xor_sync(kAllLanes, made.all, distance);
      made.before += __shfl_xor_sync(kAllLanes, made.before, distance);
    }
    return made;
  }

  // The keys of this warp that are among the largest of the row.
  __device__ __forceinline__ Cut search() {
    // Enough reach `low`, too few `high`. The first one stands for what is no number, too.
    const int least = rank_of(kMinus);
    Counted low{least - 1, p.end - p.begin, 0, 0};
    Counted high{rank_of(kPlus) + 1, 0, 0, 0};
    int apart = 0;  // of the levels, the first of which is `first`
    int first = 0;
    if (low.all > p.count && p.tokens >= 64 * kPairs) {
      int past = high.level;
      first = low.level;
      bracket(first, past);
      apart = max(1, (past - first) / 3);
    }
    bool halved = false;
#pragma unroll 1
    while (high.level - low.level > 1 && low.all > p.count) {
      const int between = high.level - low.level;
      if (halved) {
        const float part = __fdiv_rn(static_cast<float>(low.all - p.count),
                                     static_cast<float>(low.all - high.all));
        apart = max(1, between / 64);
        first = low.level + static_cast<int>(part * static_cast<float>(between)) - apart;
      } else if (apart == 0) {
        apart = max(1, between / 5);
        first = low.level + apart;
      }
      const Counted levels =
          counted(max(low.level + 1, min(first + (lane() & 3) * apart, high.level - 1)));
      // Fewer reach higher levels.
      const int enough = __popc(__ballot_sync(kAllLanes, levels.all >= p.count) & 15);
      if (enough > 0) low = levels.of_lane(enough - 1);
      if (enough < 4) high = levels.of_lane(enough);
      halved = 2 * (high.level - low.level) <= between;
      apart = 0;
    }
    const u32 from = half_of(max(low.level, least));
    if (low.level < least || low.all <= p.count) return {from, 0, kAll};
    const u32 above = half_of(high.level);
    const i32 left = p.count - high.all - (low.before - high.before);
    if (left >= low.own - high.own) return {from, 0, kAll};
    if (left <= 0) return {above, 0, kAll};
    return {from, above, left};
  }

  // Levels that, by a sample, rather too many and rather too few keys reach.
  __device__ __forceinline__ void bracket(int& low, int& high) {
    constexpr int kLevels = 8;  // of each end, in a step
    // Pairs at even distances, an odd number of words apart; of each turn a little further, so that
    // they are not of one column of the video.
    const int apart = (p.tokens / (64 * kPairs) - 1) | 1;
    u32 sample[kPairs];
    u32 least = 0;
    u32 most = 0;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      sample[i] = pair(lane() * apart + i * (32 * apart + apart / kPairs));
      least = i == 0 ? sample[i] : min2<half_t>(least, sample[i]);
      most = i == 0 ? sample[i] : max2<half_t>(most, sample[i]);
    }
    auto count_sample = [&](u32 from) {
      float sum[4] = {};
      const u32 ones = lane() < 4 ? kOnes : 0;
#pragma unroll
      for (int i = 0; i < kPairs; i += 4)
        add(sum, make_uint4(sample[i], sample[i + 1], sample[i + 2], sample[i + 3]),
            from * 0x10001u, ones, ones);
      return __reduce_add_sync(kAllLanes, static_cast<i32>(sum[0] + sum[2]));
    };
    // Of lane i % 16 target i / 8, which the highest level that so many of the sample reach is at
    // least `from` and below `past`, and the level i % 8 of those between.
    const int target = lane() / kLevels % 2 == 0 ? p.sample_more : p.sample_fewer;
    int from =
        max(rank_of(kMinus),
            __reduce_min_sync(kAllLanes, min(rank_of(least & 0xffffu), rank_of(least >> 16))));
    int past =
        1 + min(rank_of(kPlus),
                __reduce_max_sync(kAllLanes, max(rank_of(most & 0xffffu), rank_of(most >> 16))));
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
      if (!__any_sync(kAllLanes, past - from > kClose)) break;
      const int level = from + (past - from) * (lane() % kLevels + 1) / (kLevels + 1);
      i32* const counts = exchange.counts[turn ^= 1];
#pragma unroll
      for (int i = 0; i < 2 * kLevels; i += kWarps) {
        const i32 own = count_sample(half_of(__shfl_sync(kAllLanes, level, i + warp())));
        if (lane() == 0) counts[i + warp()] = own;
      }
      __syncthreads();
      const u32 enough = __ballot_sync(kAllLanes, counts[lane() % (2 * kLevels)] >= target);
      const int half = lane() & kLevels;
      const int reached = __popc(enough >> half & first_bits(kLevels));
      const int below = __shfl_sync(kAllLanes, level, half + max(reached - 1, 0));
      const int beyond = __shfl_sync(kAllLanes, level, half + min(reached, kLevels - 1));
      if (reached > 0) from = below;
      if (reached < kLevels) past = beyond;
    }
    // Of shares at the ends the sample says nothing.
    from = __shfl_sync(kAllLanes, from, 0);
    past = __shfl_sync(kAllLanes, past, kLevels);
    if (p.sample_more <= 64 * kPairs) low = from;
    if (p.sample_fewer > 0) high = past;
  }

  // Words `first` to `first` + 31: those of lane i is word i / 4 + 8 (i % 4), 1 where keys reach.
  __device__ __forceinline__ u32 word_from(int first, u32 level) const {
    // A unit is eight words, of which a lane has 8 bits. Rows are multiplied with powers of two;
    // the sums of lanes 4 r and 4 r + 1 are in a column, those of the next two lanes in the next
    // one, and other units in other columns.
    const bool mine = (lane() >> 2 & 1) == (lane() >> 1 & 1);
    const u32 higher = lane() & 1 ? 0x20002000u : 0;  // 256 times as much
    float c[4] = {};
#pragma unroll
    for (int unit = 0; unit < 4; ++unit) {
      const bool here = mine && lane() / 8 == unit;
      add(c, chunk(min(4 * first + 32 * unit + lane(), chunks() - 1)), level * 0x10001u,
          here ? 0x40003c00u + higher : 0, here ? 0x48004400u + higher : 0);
    }
    // Whole numbers below 65,536 in the low bits of floats.
    constexpr float kWhole = 8388608.0f;
    const u32 low = __float_as_uint(c[2] * 16.0f + (c[0] + kWhole));
    const u32 high = __float_as_uint(c[3] * 16.0f + (c[1] + kWhole));
    return (low & 0xffffu) | high << 16;
  }

  // The place of a lane's word, and the lane of a word.
  static __device__ __forceinline__ int word_of(int lane) { return (lane & 3) * 8 + (lane >> 2); }
  static __device__ __forceinline__ int lane_of(int word) { return (word & 7) * 4 + (word >> 3); }

  // The words of this warp's keys.
  __device__ __forceinline__ void write(Cut cut) const {
    const int end = warp() == kWarps - 1 ? words() : min(words(), kUnit / 32 * edge(warp() + 1));
#pragma unroll 1
    for (int first = kUnit / 32 * edge(warp()); first < end; first += 32) {
      u32 kept = word_from(first, cut.from);
      if (cut.left != kAll) kept = first_of(kept, word_from(first, cut.above), cut.left);
      const int word = first + word_of(lane());
      if (word < end) put(word, p.drawn != 0 ? kept | drawn(word) : kept);
    }
  }

  // All that is in `above` too, and the first `left` keys of the rest of `kept`.
  static __device__ __forceinline__ u32 first_of(u32 kept, u32 above, i32& left) {
    const u32 at = kept & ~above;
    const i32 own = __popc(at);
    const i32 all = __reduce_add_sync(kAllLanes, own);
    if (all <= left) {
      left -= all;
      return kept;
    }
    if (left == 0) return above;
    // In the order of words, with all lower ones.
    i32 sum = __shfl_sync(kAllLanes, own, lane_of(lane()));
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const i32 other = __shfl_sync(kAllLanes, sum, lane() - distance);
      if (lane() >= distance) sum += other;
    }
    i32 rest = left - (__shfl_sync(kAllLanes, sum, word_of(lane())) - own);
    left = 0;
    if (rest <= 0) return above;
    if (rest >= own) return kept;
    // The most bits of which no more than `rest` are on.
    int bits = 0;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const i32 on = __popc(at >> bits & first_bits(step));
      if (on <= rest) {
        bits += step;
        rest -= on;
      }
    }
    return above | (at & first_bits(bits));
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
    const bool text = first < p.text_end && first + 32 > p.text_begin;
    if (text || first < p.begin || first + 32 > p.end) {
      const u32 competing = first_bits(p.end - first) & ~first_bits(p.begin - first);
      const u32 anyhow = first_bits(p.text_end - first) & ~first_bits(p.text_begin - first);
      kept = (kept | anyhow | ~competing) & first_bits(p.tokens - first);
    }
    p.bits[static_cast<i64>(blockIdx.x) * p.words_pitch + word] = kept;
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
