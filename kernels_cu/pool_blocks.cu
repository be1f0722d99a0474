// Blocks of tokens to one row each: the mean, largest and smallest value of each channel, and how
// alike the tokens are, in any order of the tokens.
//
//   order  = orders[choice[plane]], or each of the orders in turn, or raster
//   rows   x[plane, order[i]] for the i of the block; with `normalise` divided by their lengths
//   mean      (planes, blocks, d)           high, low: likewise
//   extremes  (planes, blocks, 2, d)        high and low in the elements' own, exact type
//   alike     (planes, candidates, blocks)  |mean|^2, which of unit vectors is the mean cosine
//             similarity of all pairs
//
// A warp takes a block, so no result depends on another warp. Lanes have four channels each, 128 a
// chunk, and kRows rows in flight: 2 KB a warp and 48 KB a multiprocessor, more than HBM needs.
// Warps that follow each other have one plane, so that several orders of it are served by L2. No
// shared memory.
//
// Expected on an H200, a prediction, for 57,600 tokens x 8 heads x 128 x 2 bytes (118 MB), with
// 4.2 TB/s from HBM, 5.5 TB/s from L2, and 132 SMs that issue 4 a cycle at 1.75 GHz:
//     high and low of blocks of 64     28 us of HBM; 45 instructions a row, 23 us
//     means of such blocks             28 us of HBM; 37 a row, 18 us
//     unit vectors of runs of 4        118 MB read, 59 MB written: 42 us; 80 a row, 40 us
//     alike of 6 orders of such runs   6 x 59 MB: 64 us of L2; 30 a run, 22 us
// SPADE's mask is these, with the extremes of q and k, choose_order, extreme_scores and keep_top:
// 42 + 64 + 3 + 2 x 28 + 30 + 12 = 207 us.
#pragma once

#include "common/finite.cuh"
#include "common/ptx.cuh"
#include "common/types.cuh"
#include "common/widen.cuh"

namespace tessera {

struct PoolParams {
  const void* x;
  Strides stride;
  const i32* orders;  // (order_count, tokens), or null: raster
  const i32* choice;  // (planes), or null: order 0
  const i32* starts;  // (blocks + 1), or null: blocks of `block` tokens
  float* mean;        // these and the next four or null
  float* high;
  float* low;
  float* alike;
  void* extremes;  // (planes, blocks, 2, d) of 16-bit elements: high, then low; d is in fours
  i32* flag;       // set where x holds NaN or infinities, or null
  i32 planes;
  i32 heads;
  i32 tokens;
  i32 head_dim;
  i32 blocks;
  i32 block;
  i32 candidates;  // orders that each plane is read in; with one, its choice
  i32 order_count;
  i32 normalise;
  i32 vectors;  // 1: four elements may be read at once
};

// Four neighbouring elements as float32.
template <typename T>
struct Four {
  uint2 raw;

  __device__ __forceinline__ void read(const T* from) {
    raw = __ldg(reinterpret_cast<const uint2*>(from));
  }
  __device__ __forceinline__ void read_some(const T* from, int count) {
    const u16* const bits = reinterpret_cast<const u16*>(from);
    u32 some[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) some[i] = i < count ? __ldg(bits + i) : 0;
    raw = make_uint2(some[0] | some[1] << 16, some[2] | some[3] << 16);
  }
  __device__ __forceinline__ void clear() { raw = make_uint2(0, 0); }
  __device__ __forceinline__ float operator[](int i) const {
    const u32 pair = i < 2 ? raw.x : raw.y;
    return widened<T>(i % 2 ? pair >> 16 : pair);
  }
};

template <>
struct Four<float> {
  float value[4];

  __device__ __forceinline__ void read(const float* from) {
    const float4 four = __ldg(reinterpret_cast<const float4*>(from));
    value[0] = four.x;
    value[1] = four.y;
    value[2] = four.z;
    value[3] = four.w;
  }
  __device__ __forceinline__ void read_some(const float* from, int count) {
#pragma unroll
    for (int i = 0; i < 4; ++i) value[i] = i < count ? __ldg(from + i) : 0.0f;
  }
  __device__ __forceinline__ void clear() { value[0] = value[1] = value[2] = value[3] = 0.0f; }
  __device__ __forceinline__ float operator[](int i) const { return value[i]; }
};

// The same in all lanes: both of a pair add the same two numbers.
__device__ __forceinline__ float lanes_sum(float value) {
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) value += __shfl_xor_sync(~0u, value, apart);
  return value;
}

// Sets the flag if one of the lane's channels of a block holds no number.
template <typename T>
__device__ __forceinline__ void look_again(const PoolParams& p, const T* x, const i32* places,
                                           int begin, int end) {
  bool found = false;
#pragma unroll 1
  for (int at = begin; at < end; ++at) {
    const T* const row = x + (places == nullptr ? at : __ldg(places + at)) * p.stride.row;
#pragma unroll 1
    for (int channel = 4 * (threadIdx.x & 31); channel < p.head_dim; channel += 128) {
      Four<T> four;
      four.read_some(row + channel, p.head_dim - channel);
#pragma unroll
      for (int i = 0; i < 4; ++i) found = found || !is_finite(four[i]);
    }
  }
  if (found) *p.flag = 1;
}

// What a lane knows of its channels.
template <int kChunks>
struct Channels {
  float sum[kChunks][4];
  float high[kChunks][4];
  float low[kChunks][4];
};

// One block of one plane in one order. kChunks: of 128 channels.
template <typename T, int kChunks>
__device__ __forceinline__ void pool_block(const PoolParams& p, u32 plane, u32 candidate,
                                           u32 block) {
  constexpr int kRows = (sizeof(T) == 2 ? 8 : 4) / kChunks;
  const int lane = threadIdx.x & 31;
  const T* const x = static_cast<const T*>(p.x) +
                     static_cast<i64>(plane / static_cast<u32>(p.heads)) * p.stride.batch +
                     static_cast<i64>(plane % static_cast<u32>(p.heads)) * p.stride.head;
  const i32* places = p.orders;
  if (places != nullptr) {
    int order = static_cast<int>(candidate);
    // A choice out of range must not lead out of the orders.
    if (p.choice != nullptr) order = max(0, min(__ldg(p.choice + plane), p.order_count - 1));
    places += static_cast<i64>(order) * p.tokens;
  }
  const int begin = p.starts == nullptr ? block * p.block : __ldg(p.starts + block);
  const int end =
      p.starts == nullptr ? min(begin + p.block, p.tokens) : __ldg(p.starts + block + 1);

  Channels<kChunks> of;
#pragma unroll
  for (int c = 0; c < kChunks; ++c)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      of.sum[c][i] = 0.0f;
      of.high[c][i] = negative_infinity();
      of.low[c][i] = -negative_infinity();
    }
  // Each of the first kRows lanes knows where one of the rows lies, the next ones' places are read
  // while these are.
  const bool ranges = p.high != nullptr || p.low != nullptr || p.extremes != nullptr;
  auto place = [&](int first) {
    const int at = min(first + lane % kRows, end - 1);
    return places == nullptr ? at : __ldg(places + at);
  };
  i32 next = begin < end ? place(begin) : 0;
#pragma unroll 1
  for (int first = begin; first < end; first += kRows) {
    const i32 own = next;
    if (first + kRows < end) next = place(first + kRows);
    const T* row[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) row[r] = x + __shfl_sync(~0u, own, r) * p.stride.row;
    Four<T> four[kRows][kChunks];
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const int channel = 128 * c + 4 * lane;
        if (channel >= p.head_dim) {
          four[r][c].clear();
        } else if (p.vectors) {
          four[r][c].read(row[r] + channel);
        } else {
          four[r][c].read_some(row[r] + channel, p.head_dim - channel);
        }
      }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (first + r >= end) break;
      float scale = 1.0f;
      if (p.normalise) {
        float square = 0.0f;
#pragma unroll
        for (int c = 0; c < kChunks; ++c)
#pragma unroll
          for (int i = 0; i < 4; ++i) square = fmaf(four[r][c][i], four[r][c][i], square);
        scale = 1.0f / sqrtf(fmaxf(lanes_sum(square), 1e-24f));
      }
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float value = four[r][c][i];
          of.sum[c][i] = fmaf(value, scale, of.sum[c][i]);
        }
      if (!ranges) continue;
#pragma unroll
      for (int c = 0; c < kChunks; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float value = four[r][c][i];
          of.high[c][i] = fmaxf(of.high[c][i], value);
          of.low[c][i] = fminf(of.low[c][i], value);
        }
    }
  }
  const float count = static_cast<float>(end - begin);
  const i64 target = (static_cast<i64>(plane) * p.blocks + block) * p.head_dim;
  float square = 0.0f;
  bool suspect = false;
#pragma unroll
  for (int c = 0; c < kChunks; ++c)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int channel = 128 * c + 4 * lane + i;
      const float mean = __fdiv_rn(of.sum[c][i], count);
      suspect = suspect || !is_finite(of.sum[c][i]);
      square = fmaf(mean, mean, square);
      if (channel >= p.head_dim) continue;
      if (p.mean != nullptr) p.mean[target + channel] = mean;
      if (p.high != nullptr) p.high[target + channel] = of.high[c][i];
      if (p.low != nullptr) p.low[target + channel] = of.low[c][i];
    }
  if constexpr (sizeof(T) == 2) {
    u16* const pair = static_cast<u16*>(p.extremes) + 2 * target;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int channel = 128 * c + 4 * lane;
      if (p.extremes == nullptr || channel >= p.head_dim) continue;
      auto put = [](u16* to, const float (&four)[4]) {
        *reinterpret_cast<uint2*>(to) =
            make_uint2(pack2<T>(four[0], four[1]), pack2<T>(four[2], four[3]));
      };
      put(pair + channel, of.high[c]);
      put(pair + p.head_dim + channel, of.low[c]);
    }
  }
  // What is no number makes the sum none; large numbers may do so, too.
  if (suspect && p.flag != nullptr) look_again<T>(p, x, places, begin, end);
  if (p.alike == nullptr) return;
  square = lanes_sum(square);
  if (lane == 0) {
    p.alike[(static_cast<i64>(plane) * p.candidates + candidate) * p.blocks + block] = square;
  }
}

template <typename T, int kWarps>
__device__ __forceinline__ void pool_blocks(const PoolParams& p) {
  const u32 item = blockIdx.x * kWarps + (threadIdx.x >> 5);
  const u32 blocks = p.blocks;
  const u32 candidates = p.candidates;
  const u32 plane = item / (blocks * candidates);
  if (plane >= static_cast<u32>(p.planes)) return;
  const u32 candidate = item / blocks % candidates;
  if (p.head_dim <= 128) {
    pool_block<T, 1>(p, plane, candidate, item % blocks);
  } else {
    pool_block<T, 2>(p, plane, candidate, item % blocks);
  }
}

}  // namespace tessera

// The one entry of a specialisation.
#define TESSERA_POOL_BLOCKS(T, WARPS, MIN_CTAS)                         \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)    \
      pool_blocks(const __grid_constant__ tessera::PoolParams params) { \
    using namespace tessera;                                            \
    tessera::pool_blocks<T, WARPS>(params);                             \
  }
