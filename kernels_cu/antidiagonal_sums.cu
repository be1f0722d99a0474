// From antidiagonal_scores.cu's logarithms to the attention that each pair of blocks gets:
//
//   out[i, j] = ln sum of 2^(in[g, j] - log2 sum_j' 2^in[g, j'])   over the groups g of query block
//   i
//
// One CTA a query block: a warp sums a row at a time, then each thread adds up columns, always in
// the order of the rows. Shared memory: a float for each row.
#pragma once

#include "common/ptx.cuh"
#include "common/types.cuh"

namespace tessera {

struct AntidiagonalSumsParams {
  const float* logs;  // (heads, groups, blocks), log2
  float* out;         // (heads, blocks, blocks), natural logarithms
  i32 groups;
  i32 blocks;
  i32 block_groups;  // at most 16
};

template <int kWarps>
__device__ __forceinline__ void antidiagonal_sums(const AntidiagonalSumsParams& p) {
  extern __shared__ __align__(1024) u8 dynamic_smem[];
  float* const totals = reinterpret_cast<float*>(dynamic_smem);
  const int lane = threadIdx.x & 31;
  const int head = blockIdx.x / static_cast<u32>(p.blocks);
  const int block = blockIdx.x % static_cast<u32>(p.blocks);
  const int first = block * p.block_groups;
  const int rows = min(p.block_groups, p.groups - first);
  const float* const logs = p.logs + (static_cast<i64>(head) * p.groups + first) * p.blocks;

  for (int row = threadIdx.x >> 5; row < rows; row += kWarps) {
    const float* const of_row = logs + static_cast<i64>(row) * p.blocks;
    float top = negative_infinity();
    for (int j = lane; j < p.blocks; j += 32) top = fmaxf(top, __ldg(of_row + j));
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
      top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
    float sum = 0.0f;
    for (int j = lane; j < p.blocks; j += 32) sum += exp2_approx(__ldg(of_row + j) - top);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    if (lane == 0) totals[row] = top + log2_approx(sum);
  }
  __syncthreads();
  float* const out = p.out + static_cast<i64>(blockIdx.x) * p.blocks;
  for (int j = threadIdx.x; j < p.blocks; j += kWarps * 32) {
    float sum = 0.0f;
    for (int row = 0; row < rows; ++row)
      sum += exp2_approx(__ldg(logs + static_cast<i64>(row) * p.blocks + j) - totals[row]);
    out[j] = log2_approx(sum) * 0.6931471805599453f;
  }
}

}  // namespace tessera

// The one entry of a specialisation.
#define TESSERA_ANTIDIAGONAL_SUMS(WARPS, MIN_CTAS)                                        \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)                      \
      antidiagonal_sums(const __grid_constant__ tessera::AntidiagonalSumsParams params) { \
    tessera::antidiagonal_sums<WARPS>(params);                                            \
  }
