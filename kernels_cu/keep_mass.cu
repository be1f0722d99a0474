// Of each row of scores the fewest columns, by falling p, whose p reaches a part of the row's sum;
// ties to the lower column; at least so many; and what is kept anyhow.
//
//   p[j] = weight[j] * 2^((score[j] - max score) * log2 e)
//
// p is not negative, so its bits are its key. The boundary is the largest level from which on the
// keys sum to enough; of those at it as many are kept as it takes. How a row is searched, and that
// its sums have a fixed order: common/rows.cuh. NaN counts as minus infinity.
//
// A warp takes a row of up to 1,536 columns, a CTA a longer one, and then the one a grid further.
// Shared memory: two words a warp, for long rows.
//
// Expected on an H200, a prediction, for 8 heads x 900 rows x 900 columns: 3,000 instructions a
// row, of which 2,000 are the up to 30 steps of the search: 24 us.
#pragma once

#include "common/ptx.cuh"
#include "common/rows.cuh"
#include "common/types.cuh"

namespace tessera {

struct KeepMassParams {
  const float* score;    // (rows, columns)
  const float* weights;  // (weight batches, weight heads, columns) of at least 0, or null
  u8* kept;              // (rows, columns)
  const u8* always;      // bytes of always_rows rows, again and again; or null
  i32 rows;
  i32 rows_of_head;
  i32 heads;
  i64 weights_batch;  // from a batch's weights to the next's; 0 where all have the same
  i64 weights_head;
  i32 always_rows;
  i32 columns;
  i32 least;
  float mass;
};

template <int kWarps, bool kWide>
__device__ __forceinline__ void keep_mass_rows(const KeepMassParams& p) {
  using Keys = Row<kWarps, kWide>;
  static __shared__ RowExchange<kWarps> exchange;
  Keys row(exchange, p.columns);
  const int warp = kWide ? 0 : threadIdx.x >> 5;
  constexpr int kRowsAtOnce = kWide ? 1 : kWarps;
  for (int r = blockIdx.x * kRowsAtOnce + warp; r < p.rows; r += gridDim.x * kRowsAtOnce) {
    const i64 start = static_cast<i64>(r) * p.columns + row.first();
    const int plane = r / p.rows_of_head;
    const float* const score = p.score + start;
    const float* const weights = p.weights == nullptr
                                     ? nullptr
                                     : p.weights + plane / p.heads * p.weights_batch +
                                           plane % p.heads * p.weights_head + row.first();
    const u8* const always =
        p.always == nullptr
            ? nullptr
            : p.always + static_cast<i64>(r % p.always_rows) * p.columns + row.first();

    auto raw = [score](int at) { return ordered(__ldg(score + at)); };
    row.hold(raw);
    const u32 top_key = row.range(raw).y;
    const float top = unordered(top_key);
    auto key = [score, weights, top, top_key](int at) {
      const u32 own = ordered(__ldg(score + at));
      // Also where both are infinite.
      float value = 1.0f;
      if (own != top_key) value = exp2_approx((unordered(own) - top) * 1.4426950408889634f);
      if (weights != nullptr) value *= __ldg(weights + at);
      return __float_as_uint(value);
    };
    row.hold(key);
    const uint2 keys = row.range(key);

    int kept = p.mass < 1.0f ? 0 : p.columns;
    Boundary boundary{~0u, 0};  // above all
    if (p.mass > 0.0f && p.mass < 1.0f) {
      const float wanted = p.mass * row.sum_from(key, 0);
      bool done;
      boundary.level = row.search(keys, done, [&](u32 candidate) {
        return row.sum_from(key, candidate) >= wanted ? Keys::kEnough : Keys::kLess;
      });
      const int above = row.count_from(key, boundary.level + 1);
      const float missing = wanted - row.sum_from(key, boundary.level + 1);
      const float each = __uint_as_float(boundary.level);
      // All of a level of zeros would be as far from the sum as none.
      boundary.ties = each > 0.0f ? max(1, static_cast<int>(ceilf(__fdiv_rn(missing, each)))) : 1;
      kept = above + boundary.ties;
    }
    if (kept < p.least || p.mass >= 1.0f) {
      boundary = row.highest(key, keys, max(kept, p.least));
    }
    row.write(key, boundary, p.kept + start, always);
  }
}

template <int kWarps>
__device__ __forceinline__ void keep_mass(const KeepMassParams& p) {
  if (p.columns <= kWarpColumns) {
    keep_mass_rows<kWarps, false>(p);
  } else {
    keep_mass_rows<kWarps, true>(p);
  }
}

}  // namespace tessera

// The one entry of a specialisation.
#define TESSERA_KEEP_MASS(WARPS, MIN_CTAS)                                \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)      \
      keep_mass(const __grid_constant__ tessera::KeepMassParams params) { \
    tessera::keep_mass<WARPS>(params);                                    \
  }
