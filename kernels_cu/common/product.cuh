// C (128 x 128, float32) = A B^T of 16-bit rows that lie anywhere, with mma.m16n8k16, or of float32
// ones, with mma.m16n8k8.
//
// For kernels that score tokens and keep only what follows from the scores: eight warps, each 64 x
// 32 of C in registers. A and B arrive in slices of 64 bytes by cp.async, three stages ahead of
// one barrier a slice. What a row is, the caller's sources say: each thread copies one 16-byte
// chunk of two rows of either side, 64 rows apart, and a source walks along them.
//
// Float32 numbers are split into a high part of tf32's 11 bits, to the nearest, and what is left,
// of which tf32 has all bits but the last. Three products are added, from small to large; the
// fourth, of what is left of both, is below 2^-24 of the whole. So a product is nearly as good as
// in float32; sums are the tensor cores'.
//
// Shared memory: 3 stages x 2 sides x 128 rows x 64 bytes = 48 KB, the most without an attribute.
#pragma once

#include "common/ptx.cuh"
#include "common/types.cuh"

namespace tessera {

// Rows of neighbouring 16-byte chunks, of which the first `left` exist; the others are zeros.
struct ForwardRows {
  u64 at;   // the next chunk of the first row
  u64 gap;  // bytes to the second row
  i32 left[2];

  __device__ __forceinline__ bool valid(int i) const { return left[i] > 0; }
  __device__ __forceinline__ void advance(int chunks) {
    at += static_cast<u64>(chunks) * 16u;
    left[0] -= chunks;
    left[1] -= chunks;
  }
};

// What is made of B on its way to the products: nothing.
struct AsRead {
  __device__ __forceinline__ void operator()(u32 (&)[4], int) const {}
};

// Rows of whole tokens, from the last token to the first. The first `absent` ones are zeros.
struct BackwardRows {
  u64 at;
  u64 gap;
  i32 absent[2];
  i32 back;   // tokens behind
  i32 chunk;  // of the token
  i32 token_chunks;

  __device__ __forceinline__ bool valid(int i) const { return back >= absent[i]; }
  __device__ __forceinline__ void advance(int chunks) {
    at += static_cast<u64>(chunks) * 16u;
    for (chunk += chunks; chunk >= token_chunks; chunk -= token_chunks) {
      at -= static_cast<u64>(token_chunks) * 32u;
      ++back;
    }
  }
};

// A number's part of 11 bits, and the rest.
__device__ __forceinline__ void split(u32 bits, u32& high, u32& rest) {
  high = (bits + 0x1000u) & 0xffffe000u;
  rest = __float_as_uint(__uint_as_float(bits) - __uint_as_float(high));
}

template <typename T>
struct Product {
  static constexpr int kWarps = 8;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kTile = 128;  // rows of A and of B
  static constexpr int kSliceChunks = 4;
  static constexpr int kStages = 3;
  static constexpr int kRowBytes = 16 * kSliceChunks;
  static constexpr int kSideBytes = kTile * kRowBytes;
  static constexpr int kSharedBytes = 2 * kStages * kSideBytes;
  // Steps of a slice; the parts of float32 leave registers for one at a time.
  static constexpr int kUnrolled = is_same<T, float> ? 1 : kSliceChunks / 2;

  // The thread's part of C: row tile of 16, column tile of 8, and as mma.m16n8k16 has it.
  float c[4][4][4];

  u8* shared;
  const int thread = threadIdx.x;
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;

  __device__ __forceinline__ explicit Product(u8* memory) : shared(memory) {}

  // Rows of a side that this thread copies: this one, and the one 64 further.
  __device__ __forceinline__ int copied_row() const { return thread >> 2; }
  __device__ __forceinline__ int copied_chunk() const { return thread & 3; }

  // Row of C that c[tile][..][2 * half] is in; column that c[..][tile][0] is in.
  __device__ __forceinline__ int row(int tile, int half) const {
    return (warp >> 2) * 64 + tile * 16 + half * 8 + (lane >> 2);
  }
  __device__ __forceinline__ int column(int tile) const {
    return (warp & 3) * 32 + tile * 8 + (lane & 3) * 2;
  }

  // Byte offset of a chunk. Eight rows at one chunk fall into eight different bank groups.
  __device__ __forceinline__ static int swizzled(int row, int chunk) {
    return row * kRowBytes + ((chunk ^ ((row >> 1) & 3)) << 4);
  }

  template <typename Rows>
  __device__ __forceinline__ void copy(u32 side, const Rows& rows) const {
    // 64 rows on, the swizzle is the same.
    const u32 target = side + swizzled(copied_row(), copied_chunk());
    cp_async16(target, rows.at, rows.valid(0));
    cp_async16(target + 64 * kRowBytes, rows.at + rows.gap, rows.valid(1));
  }

  // Computes C from the first `slices` slices of the rows; all threads, and shared memory is free
  // for other use afterwards. `change` may alter four registers of B's 16-bit pairs of a slice.
  template <typename Left, typename Right, typename Change = AsRead>
  __device__ __forceinline__ void run(int slices, Left a, Right b, Change change = {}) {
    const u32 base = smem_address(shared);
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) c[m][n][e] = 0.0f;

    u32 written = base;
    auto start_slice = [&](int slice) {
      if (slice < slices) {
        copy(written, a);
        copy(written + kSideBytes, b);
        a.advance(kSliceChunks);
        b.advance(kSliceChunks);
      }
      cp_async_commit();
      written += 2 * kSideBytes;
      if (written == base + kSharedBytes) written = base;
    };
    start_slice(0);
    start_slice(1);
    u32 read = base;
    for (int slice = 0; slice < slices; ++slice) {
      cp_async_wait<kStages - 2>();
      barrier_sync();  // the slice is visible; every warp is done with the one before
      start_slice(slice + kStages - 1);
      multiply(read, slice, change);
      read += 2 * kSideBytes;
      if (read == base + kSharedBytes) read = base;
    }
    cp_async_wait<0>();
    barrier_sync();
  }

 private:
  template <typename Change>
  __device__ __forceinline__ void multiply(u32 stage, int slice, Change change) {
    const u32 a_from = stage + swizzled((warp >> 2) * 64 + (lane & 15), lane >> 4);
    const u32 b_from = stage + kSideBytes +
                       swizzled((warp & 3) * 32 + (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
#pragma unroll(kUnrolled)
    for (int k = 0; k < kSliceChunks / 2; ++k) {
      u32 right[2][4];
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        ldmatrix_x4(right[pair], (b_from ^ (k << 5)) + pair * 16 * kRowBytes);
        if constexpr (!is_same<T, float>) change(right[pair], slice);
      }
      if constexpr (is_same<T, float>) {
        multiply_parts(a_from ^ (k << 5), right);
      } else {
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          u32 left[4];
          ldmatrix_x4(left, (a_from ^ (k << 5)) + m * 16 * kRowBytes);
#pragma unroll
          for (int n = 0; n < 4; ++n)
            mma_m16n8k16<T>(c[m][n], left, right[n >> 1][2 * (n & 1)],
                            right[n >> 1][2 * (n & 1) + 1]);
        }
      }
    }
  }

  // Eight float32 columns of A and B; fragments of a matrix of 8 x 16 bytes are what mma.m16n8k8
  // takes.
  __device__ __forceinline__ void multiply_parts(u32 a_from, const u32 (&right)[2][4]) {
    u32 right_high[2][4];
    u32 right_rest[2][4];
#pragma unroll
    for (int pair = 0; pair < 2; ++pair)
#pragma unroll
      for (int i = 0; i < 4; ++i) split(right[pair][i], right_high[pair][i], right_rest[pair][i]);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      u32 left[4];
      u32 left_high[4];
      u32 left_rest[4];
      ldmatrix_x4(left, a_from + m * 16 * kRowBytes);
#pragma unroll
      for (int i = 0; i < 4; ++i) split(left[i], left_high[i], left_rest[i]);
      auto add = [&](const u32(&a)[4], const u32(&b)[2][4]) {
#pragma unroll
        for (int n = 0; n < 4; ++n)
          mma_m16n8k8_tf32(c[m][n], a, b[n >> 1][2 * (n & 1)], b[n >> 1][2 * (n & 1) + 1]);
      };
      add(left_rest, right_high);
      add(left_high, right_rest);
      add(left_high, right_high);
    }
  }
};

}  // namespace tessera
