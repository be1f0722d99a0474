// What the sizes of ragged blocks add to a mask's state (mask_state.cu): where each block begins,
// and the bitmap and scalars of a mask without its absent blocks, those of size 0.
//
//   sizes   i32 or i64 with any strides (0 along axes that broadcast), of one side or both.
//   starts  i32 [mask heads][blocks + 1]: first token of each block, and the end. A size below 0 or
//           above the nominal one counts as the nearest that is none of these, and no start is past
//           the tokens, so whatever the sizes hold, all blocks lie inside. Both are flagged, as are
//           sizes that do not sum to the tokens.
//   bitmap  as mask_state.cu writes it, for every head of the mask and the sizes together: heads
//           that broadcast in the mask have a copy each. The scalars are counted anew, and the
//           blocks that are present, on or off.
//
// CTAs of the first kind, two for each head, sum up the sizes of one side, 1024 at a time. In the
// others a warp takes kRows rows of a head: a ballot of 32 sizes is a word of the present columns.
// Lanes have a word each, from the right end of the row to the left, as in mask_state.cu.
//
// Shared memory: one sum a warp, and four numbers.
//
// Expected on an H200, a prediction, 8 heads x 900 x 900: 900 warps of 28 reads of sizes and 8 of
// the bitmap, which wait for memory about 6 times together: 3 us of launch and 5 us.
#pragma once

#include "common/builders.cuh"
#include "common/types.cuh"

namespace tessera {

// Sizes of one side; null where its blocks are uniform.
struct BlockSizes {
  const void* sizes;
  i32* starts;
  i64 batch_stride;  // in elements
  i64 head_stride;
  i64 stride;
  i32 blocks;
  i32 most;  // tokens of a block
  i32 tokens;
  i32 wide;  // 1: sizes are i64, 0: i32
};

struct RaggedBlocksParams {
  BlockSizes q;
  BlockSizes kv;
  const u32* mask_bitmap;   // of the mask alone
  const i64* mask_scalars;  // of which the errors are taken over
  u32* bitmap;
  i64* scalars;  // zeros before the launch
  i32 batch;     // of mask and sizes together
  i32 heads;
  i32 mask_batch;
  i32 mask_heads;
};

inline constexpr int kRows = 8;  // of a warp

template <int kWarps>
struct RaggedStorage {
  i64 sums[kWarps];
  u64 nnz;
  u64 in_runs;
  u64 present;
  u32 errors;
};

// A size as it counts, and what is wrong with it.
struct CheckedSize {
  i32 size;
  u32 errors;
};

class HeadSizes {
 public:
  __device__ __forceinline__ HeadSizes(const BlockSizes& side, int batch, int head)
      : side_(side), first_(batch * side.batch_stride + head * side.head_stride) {}

  __device__ __forceinline__ CheckedSize operator[](int block) const {
    const i64 size = integer(side_.sizes, first_ + block * side_.stride, side_.wide);
    const i64 inside = max(0ll, min(size, static_cast<i64>(side_.most)));
    return {static_cast<i32>(inside), inside == size ? 0u : kBadSize};
  }

  __device__ __forceinline__ bool present(int block) const {
    return block < side_.blocks && (side_.sizes == nullptr || (*this)[block].size > 0);
  }

 private:
  const BlockSizes& side_;
  const i64 first_;
};

template <int kWarps>
__device__ __forceinline__ void block_starts(const BlockSizes& side, int batch, int head, int heads,
                                             RaggedStorage<kWarps>& shared) {
  static_assert(kWarps <= 32, "one lane for each warp's sum");
  constexpr int kEach = 4;
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  const HeadSizes sizes(side, batch, head);
  i32* const starts = side.starts + static_cast<i64>(batch * heads + head) * (side.blocks + 1);
  const i64 tokens = side.tokens;
  u32 errors = 0;
  i64 done = 0;
#pragma unroll 1
  for (int base = 0; base < side.blocks; base += kEach * 32 * kWarps) {
    const int begin = base + kEach * threadIdx.x;
    i32 size[kEach];
    i64 sum = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const CheckedSize checked = begin + j < side.blocks ? sizes[begin + j] : CheckedSize{0, 0};
      size[j] = checked.size;
      errors |= checked.errors;
      sum += checked.size;
    }
    const i64 upto = warp_scan(sum);
    if (lane == 31) shared.sums[warp] = upto;
    __syncthreads();
    const i64 of_warp = lane < kWarps ? shared.sums[lane] : 0;
    i64 next = done + warp_total(lane < warp ? of_warp : 0) + upto - sum;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      if (begin + j < side.blocks) starts[begin + j] = static_cast<i32>(min(next, tokens));
      next += size[j];
    }
    done += warp_total(of_warp);
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    starts[side.blocks] = static_cast<i32>(min(done, tokens));
    if (done != tokens) errors |= kBadTotal;
  }
  if (errors != 0) atomicOr(&shared.errors, errors);
}

template <int kWarps>
__device__ __forceinline__ void present_rows(const RaggedBlocksParams& p, i64 item,
                                             RaggedStorage<kWarps>& shared) {
  const int lane = threadIdx.x & 31;
  const int chunks = (p.q.blocks + kRows - 1) / kRows;
  if (item >= static_cast<i64>(p.batch) * p.heads * chunks) return;
  const int words = (p.kv.blocks + 31) / 32;
  const int head_of_all = static_cast<int>(item / chunks);
  const int row = static_cast<int>(item - static_cast<i64>(head_of_all) * chunks) * kRows;
  const int batch = head_of_all / p.heads;
  const int head = head_of_all - batch * p.heads;
  const i64 mask_head =
      static_cast<i64>(p.mask_batch > 1 ? batch : 0) * p.mask_heads + (p.mask_heads > 1 ? head : 0);
  const u32* const from = p.mask_bitmap + (mask_head * p.q.blocks + row) * words;
  u32* const to = p.bitmap + (static_cast<i64>(head_of_all) * p.q.blocks + row) * words;
  const HeadSizes q_sizes(p.q, batch, head);
  const HeadSizes kv_sizes(p.kv, batch, head);
  const u32 rows = __ballot_sync(kAllLanes, lane < kRows && q_sizes.present(row + lane));
  u32 nnz = 0;
  u32 in_runs = 0;
  u32 present = 0;
  u32 after = 0;  // lane i's: what follows lane 31's word in row i
#pragma unroll 1
  for (int first = (words - 1) & -32; first >= 0; first -= 32) {
    u32 columns = 0;
#pragma unroll 8
    for (int i = 0; i < 32; ++i) {
      const u32 word = __ballot_sync(kAllLanes, kv_sizes.present(32 * (first + i) + lane));
      if (i == lane) columns = word;
    }
    present += __popc(columns) * __popc(rows);
    const int index = first + lane;
    u32 word[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const bool on = index < words && (rows >> i & 1) != 0;
      word[i] = on ? from[static_cast<i64>(i) * words + index] & columns : 0;
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const u32 right = __shfl_sync(kAllLanes, word[i], lane + 1);  // modulo 32
      const u32 kept = __shfl_sync(kAllLanes, after, i);
      const u32 next = lane == 31 ? kept : right;
      const u32 leftmost = __shfl_sync(kAllLanes, word[i], 0);
      if (lane == i) after = leftmost;
      const u32 pairs = word[i] & __funnelshift_r(word[i], next, 1);
      nnz += __popc(word[i]);
      in_runs += __popc(pairs) + __popc(pairs & ~__funnelshift_r(word[i], next, 2));
      if (index < words && row + i < p.q.blocks) to[static_cast<i64>(i) * words + index] = word[i];
    }
  }
  nnz = __reduce_add_sync(kAllLanes, nnz);
  in_runs = __reduce_add_sync(kAllLanes, in_runs);
  present = __reduce_add_sync(kAllLanes, present);
  if (lane == 0 && present != 0) {
    atomicAdd(&shared.present, static_cast<u64>(present));
    atomicAdd(&shared.nnz, static_cast<u64>(nnz));
    atomicAdd(&shared.in_runs, static_cast<u64>(in_runs));
  }
}

template <int kWarps>
__device__ __forceinline__ void ragged_blocks(const RaggedBlocksParams& p) {
  extern __shared__ __align__(1024) u8 dynamic_smem[];
  RaggedStorage<kWarps>& shared = *reinterpret_cast<RaggedStorage<kWarps>*>(dynamic_smem);
  if (threadIdx.x == 0) {
    shared.nnz = shared.in_runs = shared.present = 0;
    shared.errors = blockIdx.x == 0 ? static_cast<u32>(p.mask_scalars[kErrors]) : 0;
  }
  __syncthreads();
  const int heads = p.batch * p.heads;
  const int block = blockIdx.x;
  if (block < 2 * heads) {
    const BlockSizes& side = block < heads ? p.q : p.kv;
    const int of_all = block < heads ? block : block - heads;
    const int batch = of_all / p.heads;
    if (side.sizes != nullptr) {
      block_starts(side, batch, of_all - batch * p.heads, p.heads, shared);
    }
  } else {
    present_rows(p, static_cast<i64>(block - 2 * heads) * kWarps + (threadIdx.x >> 5), shared);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  u64* const scalars = reinterpret_cast<u64*>(p.scalars);
  if (shared.nnz != 0) atomicAdd(scalars + kNnz, shared.nnz);
  if (shared.present != 0) atomicAdd(scalars + kPresent, shared.present);
  if (shared.in_runs != 0) atomicAdd(scalars + kInRuns, shared.in_runs);
  if (shared.errors != 0) atomicOr(scalars + kErrors, static_cast<u64>(shared.errors));
}

}  // namespace tessera

// The one entry of a specialisation.
#define TESSERA_RAGGED_BLOCKS(WARPS)                                              \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)                     \
      ragged_blocks(const __grid_constant__ tessera::RaggedBlocksParams params) { \
    tessera::ragged_blocks<WARPS>(params);                                        \
  }
