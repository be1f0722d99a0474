// The ball around the mean of each group of queries, and the length of each key:
//
//   centre[g] = mean of the group's queries, in their 16-bit type
//   radius[g] = max over its queries of |q - centre[g]|
//   length[j] = |k[j]|
//
// The radius is that about the rounded centre, so that the ball holds every query of the group.
//
// A CTA of four warps takes a ball, one behind those of all balls 64 keys. As many lanes as a row
// has 16-byte chunks, rounded up to a power of two, take a row, so that a CTA has several rows at a
// time, and four times as many in flight. A ball's queries are read twice, the second time from L1.
//
// Shared memory: eight floats a thread, 4 KB, and a word a warp.
//
// Expected on an H200, a prediction, for 57,600 tokens x 8 heads x d 128: q and k once from memory,
// 236 MB, 60 us.
#pragma once

#include "common/finite.cuh"
#include "common/ptx.cuh"
#include "common/types.cuh"
#include "common/widen.cuh"

namespace tessera {

struct QueryBallsParams {
  const void* q;   // (planes, tokens, 8 chunks) of T
  const void* k;   // the same, or null: no keys
  void* centres;   // (planes, balls, 8 chunks) of T
  float* radii;    // (planes, balls)
  float* lengths;  // (planes, tokens), or null: keys are only looked at
  i32* q_flag;     // set where q holds NaN or infinities, or null
  i32* k_flag;
  i32 planes;
  i32 tokens;
  i32 chunks;  // 16-byte chunks of a row, at most 32
  i32 size;    // queries of a ball, but the last one of a plane
  i32 balls;   // of a plane; 0: keys alone
};

// Eight channels as float32.
template <typename T>
__device__ __forceinline__ void widen(float (&to)[8], uint4 chunk) {
  const u32 pairs[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to[2 * i] = widened<T>(pairs[i]);
    to[2 * i + 1] = widened<T>(pairs[i] >> 16);
  }
}

template <typename T, int kWarps>
class QueryBalls {
 public:
  __device__ __forceinline__ explicit QueryBalls(const QueryBallsParams& params)
      : p(params),
        lanes(params.chunks > 1 ? 1 << (32 - __clz(params.chunks - 1)) : 1),
        chunk(threadIdx.x & (lanes - 1)),
        slot(threadIdx.x / static_cast<u32>(lanes)),
        slots(kThreads / lanes) {}

  __device__ __forceinline__ void run() {
    const int balls = p.planes * p.balls;
    const int item = blockIdx.x;
    if (item < balls) {
      ball(item);
    } else {
      keys(item - balls);
    }
  }

  static constexpr int kKeys = 64;

 private:
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kFlight = 4;

  // Calls visit(row, its eight channels) for each of the thread's rows, zeros for channels that
  // there are not; all lanes of a row as often.
  template <typename Visit>
  __device__ __forceinline__ void each(const uint4* from, int rows, Visit visit) const {
#pragma unroll 1
    for (int first = slot; first - slot < rows; first += kFlight * slots) {
      uint4 read[kFlight];
#pragma unroll
      for (int i = 0; i < kFlight; ++i) {
        const int row = first + i * slots;
        read[i] = make_uint4(0, 0, 0, 0);
        if (row < rows && chunk < p.chunks)
          read[i] = __ldg(from + static_cast<i64>(row) * p.chunks + chunk);
      }
#pragma unroll
      for (int i = 0; i < kFlight; ++i) visit(first + i * slots, read[i]);
    }
  }

  // Of a lane's squares the row's.
  __device__ __forceinline__ float of_row(float square) const {
#pragma unroll 1
    for (int apart = 1; apart < lanes; apart *= 2) square += __shfl_xor_sync(~0u, square, apart);
    return square;
  }

  static __device__ __forceinline__ bool bad(uint4 v) {
    return not_finite<T>(v.x) || not_finite<T>(v.y) || not_finite<T>(v.z) || not_finite<T>(v.w);
  }

  __device__ __forceinline__ void ball(int item) const {
    static __shared__ float part[kThreads][8];
    static __shared__ u32 largest[kWarps];
    const int plane = item / p.balls;
    const int first = (item - plane * p.balls) * p.size;
    const int rows = min(p.size, p.tokens - first);
    const uint4* const from =
        static_cast<const uint4*>(p.q) + (static_cast<i64>(plane) * p.tokens + first) * p.chunks;
    float sum[8] = {};
    bool found = false;
    each(from, rows, [&](int, uint4 read) {
      float x[8];
      widen<T>(x, read);
      found = found || bad(read);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[i] += x[i];
    });
    if (found && p.q_flag != nullptr) *p.q_flag = 1;
#pragma unroll
    for (int i = 0; i < 8; ++i) part[threadIdx.x][i] = sum[i];
    __syncthreads();
    // The first row's lanes add up those of all rows, and leave the centre in their place.
    if (slot == 0) {
#pragma unroll 1
      for (int other = 1; other < slots; ++other) {
#pragma unroll
        for (int i = 0; i < 8; ++i) sum[i] += part[other * lanes + chunk][i];
      }
      u32 rounded[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float count = static_cast<float>(rows);
        rounded[i] = pack2<T>(__fdiv_rn(sum[2 * i], count), __fdiv_rn(sum[2 * i + 1], count));
      }
      const uint4 centre = make_uint4(rounded[0], rounded[1], rounded[2], rounded[3]);
      float mean[8];
      widen<T>(mean, centre);
#pragma unroll
      for (int i = 0; i < 8; ++i) part[chunk][i] = mean[i];
      if (chunk < p.chunks)
        static_cast<uint4*>(p.centres)[static_cast<i64>(item) * p.chunks + chunk] = centre;
    }
    __syncthreads();
    float centre[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) centre[i] = part[chunk][i];
    float most = 0.0f;
    each(from, rows, [&](int row, uint4 read) {
      float x[8];
      widen<T>(x, read);
      float square = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) square = fmaf(x[i] - centre[i], x[i] - centre[i], square);
      square = of_row(square);
      if (row < rows) most = fmaxf(most, square);
    });
    // Numbers of at least 0 are in the order of their bits.
    const u32 of_warp = __reduce_max_sync(~0u, __float_as_uint(most));
    if ((threadIdx.x & 31) == 0) largest[threadIdx.x >> 5] = of_warp;
    __syncthreads();
    if (threadIdx.x != 0) return;
    u32 all = largest[0];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) all = max(all, largest[w]);
    p.radii[item] = sqrtf(__uint_as_float(all));
  }

  __device__ __forceinline__ void keys(int item) const {
    const int parts = (p.tokens + kKeys - 1) / kKeys;
    const int plane = item / parts;
    const int first = (item - plane * parts) * kKeys;
    const int rows = min(kKeys, p.tokens - first);
    const i64 start = static_cast<i64>(plane) * p.tokens + first;
    bool found = false;
    each(static_cast<const uint4*>(p.k) + start * p.chunks, rows, [&](int row, uint4 read) {
      float x[8];
      widen<T>(x, read);
      found = found || bad(read);
      float square = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) square = fmaf(x[i], x[i], square);
      square = of_row(square);
      if (chunk == 0 && row < rows && p.lengths != nullptr) p.lengths[start + row] = sqrtf(square);
    });
    if (found && p.k_flag != nullptr) *p.k_flag = 1;
  }

  const QueryBallsParams& p;
  const int lanes;  // of a row
  const int chunk;
  const int slot;
  const int slots;  // rows at a time
};

}  // namespace tessera

// The one entry of a specialisation.
#define TESSERA_QUERY_BALLS(T, WARPS, MIN_CTAS)                               \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)          \
      query_balls(const __grid_constant__ tessera::QueryBallsParams params) { \
    tessera::QueryBalls<tessera::T, WARPS>(params).run();                     \
  }
