// Of each row of scores the `count` highest, exactly, ties to the lower column; and what is kept
// anyhow. NaN counts as minus infinity. How a row is searched: common/rows.cuh.
//
// A warp takes a row of up to 1,536 columns, a CTA a longer one, and then the one a grid further.
// Shared memory: two words a warp, for long rows.
//
// Expected on an H200, a prediction, for 8 heads x 900 rows x 900 columns: 26 MB of scores, mostly
// in L2; 1,500 instructions a row, of which 950 are 14 steps of the search: 12 us. For 1,440 x
// 1,440: 3,000 a row: 25 us.
#pragma once

#include "common/rows.cuh"
#include "common/types.cuh"

namespace tessera {

struct KeepTopParams {
  const float* score;  // (rows, columns)
  u8* kept;            // (rows, columns)
  const u8* always;    // bytes of always_rows rows, again and again; or null
  i32 rows;
  i32 always_rows;
  i32 columns;
  i32 count;
};

template <int kWarps, bool kWide>
__device__ __forceinline__ void keep_top_rows(const KeepTopParams& p) {
  static __shared__ RowExchange<kWarps> exchange;
  Row<kWarps, kWide> row(exchange, p.columns);
  const int warp = kWide ? 0 : threadIdx.x >> 5;
  constexpr int kRowsAtOnce = kWide ? 1 : kWarps;
  for (int r = blockIdx.x * kRowsAtOnce + warp; r < p.rows; r += gridDim.x * kRowsAtOnce) {
    const i64 start = static_cast<i64>(r) * p.columns + row.first();
    const u8* const always =
        p.always == nullptr
            ? nullptr
            : p.always + static_cast<i64>(r % p.always_rows) * p.columns + row.first();
    const float* const score = p.score + start;
    auto key = [score](int at) { return ordered(__ldg(score + at)); };
    row.hold(key);
    Boundary boundary{~0u, 0};  // above all
    if (p.count > 0) boundary = row.highest(key, row.range(key), p.count);
    row.write(key, boundary, p.kept + start, always);
  }
}

template <int kWarps>
__device__ __forceinline__ void keep_top(const KeepTopParams& p) {
  if (p.columns <= kWarpColumns) {
    keep_top_rows<kWarps, false>(p);
  } else {
    keep_top_rows<kWarps, true>(p);
  }
}

}  // namespace tessera

// The one entry of a specialisation.
#define TESSERA_KEEP_TOP(WARPS, MIN_CTAS)                               \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)    \
      keep_top(const __grid_constant__ tessera::KeepTopParams params) { \
    tessera::keep_top<WARPS>(params);                                   \
  }
