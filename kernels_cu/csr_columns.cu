// The columns of a mask's bitmap (mask_state.cu): a warp a row, which begins at offsets[row], the
// sum of the row counts before it. A lane has the bits of one word, ascending. No shared memory.
//
// Expected on an H200, a prediction: of 10 %, 8 heads x 900 x 900, 3.5 MB, 150 instructions a row,
// 4 us; 8 x 3600 x 3600, 54 MB, 480 a row, 16 us.
#pragma once

#include "common/builders.cuh"
#include "common/types.cuh"

namespace tessera {

struct CsrColumnsParams {
  const u32* bitmap;
  const i64* offsets;  // rows at least
  i32* columns;
  i64* scalars;  // of the mask; the error of a capacity that does not suffice is added
  i64 capacity;  // of columns; none is written past it
  i32 rows;
  i32 nk;
};

template <int kWarps>
__device__ __forceinline__ void csr_columns(const CsrColumnsParams& p) {
  const int lane = threadIdx.x & 31;
  const int words = (p.nk + 31) / 32;
  bool lost = false;
  for (int row = blockIdx.x * kWarps + (threadIdx.x >> 5); row < p.rows;
       row += gridDim.x * kWarps) {
    const u32* bits = p.bitmap + static_cast<i64>(row) * words;
    i64 begin = __ldg(p.offsets + row);
    for (int first = 0; first < words; first += 32) {
      u32 word = first + lane < words ? __ldg(bits + first + lane) : 0;
      int before = __popc(word);  // first with the lane's own
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_sync(kAllLanes, before, lane - distance);
        if (lane >= distance) before += other;
      }
      const int all = __shfl_sync(kAllLanes, before, 31);
      i64 at = begin + before - __popc(word);
      for (; word != 0; word &= word - 1) {
        if (at >= 0 && at < p.capacity) {
          p.columns[at] = 32 * (first + lane) + __ffs(static_cast<int>(word)) - 1;
        } else {
          lost = true;
        }
        ++at;
      }
      begin += all;
    }
  }
  if (lost) atomicOr(reinterpret_cast<u64*>(p.scalars + kErrors), static_cast<u64>(kCapacity));
}

}  // namespace tessera

// The one entry of a specialisation.
#define TESSERA_CSR_COLUMNS(WARPS, MIN_CTAS)                                  \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)          \
      csr_columns(const __grid_constant__ tessera::CsrColumnsParams params) { \
    tessera::csr_columns<WARPS>(params);                                      \
  }
