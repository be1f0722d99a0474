// What SpargeAttn keeps besides a mass, in place: a row that keeps several blocks gives up the
// lowest of them, with which its sum passes the mass; all rows keep the key blocks that are not
// alike, and the rows of query blocks that are not alike keep all.
//
// A warp a row, which reads the row's scores once and its bytes twice. No shared memory.
#pragma once

#include "common/builders.cuh"
#include "common/ptx.cuh"
#include "common/types.cuh"

namespace tessera {

struct AlikeRowsParams {
  const float* score;    // (heads, n, m)
  const float* alike_q;  // (heads, n)
  const float* alike_k;  // (heads, m)
  u8* kept;              // (heads, n, m), 0 or 1
  i32 rows;              // heads * n
  i32 n;
  i32 m;
  i32 gives_up;  // whether rows give up a block
  float similarity;
};

template <int kWarps>
__device__ __forceinline__ void alike_rows(const AlikeRowsParams& p) {
  const int lane = threadIdx.x & 31;
  const int row = blockIdx.x * kWarps + (threadIdx.x >> 5);
  if (row >= p.rows) return;
  const float* const score = p.score + static_cast<i64>(row) * p.m;
  const float* const alike_k = p.alike_k + static_cast<i64>(row / p.n) * p.m;
  u8* const kept = p.kept + static_cast<i64>(row) * p.m;
  int given_up = -1;
  if (p.gives_up) {
    // The lowest score; of equals the last, as ties are kept from the lower column on.
    float lowest = -negative_infinity();
    int count = 0;
    for (int j = lane; j < p.m; j += 32) {
      if (kept[j] == 0) continue;
      ++count;
      const float value = __ldg(score + j);
      if (value <= lowest) {
        lowest = value;
        given_up = j;
      }
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      const float other = __shfl_xor_sync(kAllLanes, lowest, distance);
      const int other_column = __shfl_xor_sync(kAllLanes, given_up, distance);
      if (other < lowest || (other == lowest && other_column > given_up)) {
        lowest = other;
        given_up = other_column;
      }
    }
    if (__reduce_add_sync(kAllLanes, count) < 2) given_up = -1;
  }
  const bool all = !(__ldg(p.alike_q + row) > p.similarity);
  for (int j = lane; j < p.m; j += 32) {
    const bool own = kept[j] != 0 && j != given_up;
    kept[j] = own || all || !(__ldg(alike_k + j) > p.similarity);
  }
}

}  // namespace tessera

// The one entry of a specialisation.
#define TESSERA_ALIKE_ROWS(WARPS, MIN_CTAS)                                 \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)        \
      alike_rows(const __grid_constant__ tessera::AlikeRowsParams params) { \
    tessera::alike_rows<WARPS>(params);                                     \
  }
