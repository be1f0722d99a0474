// Upper bounds of the scores of each key with the queries of each group, on tensor cores, of balls
// around the groups' means (query_balls.cu)
//
//   out[g, j] = scale * max over the parts p of g of  (centre[p] . k[j] + radius[p] |k[j]|)
//
// or, without radii, of the extremes of their channels
//
//   out[g, j] = scale * max over p of  (high[p] . max(k[j], 0) + low[p] . min(k[j], 0))
//
// as float16, so that a row of them is short. Keys that do not compete are NaN. A CTA makes 128 x
// 128 products (common/product.cuh) of 128 parts and 128 keys. For extremes the keys' rows are read
// twice, and signs are cut off on the way to the tensor cores. CTAs that follow each other have the
// same keys, so that k is read from memory once.
//
// Roles: warp w has parts 64 (w / 4) to + 63 and keys 32 (w % 4) to + 31. Bounds are put together
// in shared memory, to be written in whole lines, and there the parts of a group meet. Shared
// memory: the product's 48 KB; then, in their place, 34 KB of bounds, radii and lengths.
//
// Expected on an H200, a prediction, for 900 groups x 57,600 keys x 8 heads x d 128: 120 GFLOP with
// the tiles' edges at 250 to 300 TFLOP/s, 0.40 to 0.48 ms; 830 MB written, 0.2 ms, and 1.9 GB from
// L2, 0.35 ms, beside them. Extremes have twice the products.
#pragma once

#include "common/product.cuh"

namespace tessera {

struct KeyBoundsParams {
  const void* a;         // (planes, rows, 8 chunks) of T: centres; or (planes, rows, 2, 8 chunks):
                         // largest, then smallest values
  const void* k;         // (planes, tokens, 8 chunks) of T
  const float* radii;    // (planes, rows), or null: a has extremes
  const float* lengths;  // (planes, tokens), with radii
  u16* out;              // (planes, groups, pitch)
  i32 rows;              // parts of a plane
  i32 groups;            // of a plane, ceil(rows / parts)
  i32 parts;             // of a group: 1, 2 or 4
  i32 tokens;
  i32 pitch;   // 128 column_tiles
  i32 chunks;  // 16-byte chunks of d channels
  i32 begin;   // keys from here to `end` compete
  i32 end;
  i32 row_tiles;     // of 128
  i32 column_tiles;  // of 128
  float scale;
};

// Rows of `chunks` chunks, which are read twice, each time up to whole slices; zeros between.
struct RepeatedRows {
  u64 at;
  u64 gap;
  i32 ends[2];  // chunks of a reading, or 0: there is no such row
  i32 chunk;
  i32 half;  // chunks up to a whole slice
  i32 back;  // chunks from the first reading's end to the second's beginning

  __device__ __forceinline__ bool valid(int i) const { return chunk < ends[i]; }
  __device__ __forceinline__ void advance(int by) {
    at += static_cast<u64>(by) * 16u;
    chunk += by;
    if (chunk >= half) {
      chunk -= half;
      at -= static_cast<u64>(back) * 16u;
    }
  }
};

// Keys' positive channels in the first slices, their negative ones in the others.
template <typename T>
struct Signs {
  int half;  // slices

  __device__ __forceinline__ void operator()(u32 (&pairs)[4], int slice) const {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      pairs[i] = slice < half ? max2<T>(pairs[i], 0u) : min2<T>(pairs[i], 0u);
  }
};

template <typename T>
__device__ __forceinline__ void key_bounds(const KeyBoundsParams& p) {
  extern __shared__ __align__(1024) u8 dynamic_smem[];
  Product<T> product(dynamic_smem);
  constexpr int kTile = Product<T>::kTile;
  constexpr int kSlice = Product<T>::kSliceChunks;
  constexpr int kPitch = 2 * kTile + 16;  // bytes: eight rows at one column, eight bank groups
  const u32 tiles = static_cast<u32>(p.row_tiles) * p.column_tiles;
  const i64 plane = blockIdx.x / tiles;
  const u32 tile = blockIdx.x % tiles;
  const int first_row = static_cast<int>(tile % p.row_tiles) * kTile;
  const int first_column = static_cast<int>(tile / p.row_tiles) * kTile;
  const u64 row_bytes = static_cast<u64>(p.chunks) * 16u;
  const int row = first_row + product.copied_row();
  const int column = first_column + product.copied_row();
  const u64 a_from = reinterpret_cast<u64>(p.a);
  const u64 k_from = reinterpret_cast<u64>(p.k) + (plane * p.tokens + column) * row_bytes;
  const int slices = (p.chunks + kSlice - 1) / kSlice;

  // A thread has the radius of a row, or the length of a column; NaN if it does not compete.
  const bool of_row = product.thread < kTile;
  const int place = product.thread % kTile;
  const int key = first_column + place;
  float own = 0.0f;
  if (!of_row && (key < p.begin || key >= p.end)) {
    own = __uint_as_float(0x7fffffffu);
  } else if (p.radii != nullptr && !of_row) {
    own = __ldg(p.lengths + plane * p.tokens + key);
  } else if (p.radii != nullptr && first_row + place < p.rows) {
    own = __ldg(p.radii + plane * p.rows + first_row + place);
  }

  if (p.radii != nullptr) {
    ForwardRows a;
    ForwardRows b;
    a.at = a_from + (plane * p.rows + row) * row_bytes;
    b.at = k_from;
    a.gap = b.gap = 64 * row_bytes;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      a.left[i] = row + 64 * i < p.rows ? p.chunks : 0;
      b.left[i] = column + 64 * i < p.tokens ? p.chunks : 0;
    }
    a.advance(product.copied_chunk());
    b.advance(product.copied_chunk());
    product.run(slices, a, b);
  } else {
    RepeatedRows a;
    RepeatedRows b;
    a.at = a_from + (plane * p.rows + row) * 2 * row_bytes;
    b.at = k_from;
    a.gap = 128 * row_bytes;
    b.gap = 64 * row_bytes;
    a.chunk = b.chunk = 0;
    a.half = b.half = kSlice * slices;
    a.back = a.half - p.chunks;
    b.back = b.half;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      a.ends[i] = row + 64 * i < p.rows ? p.chunks : 0;
      b.ends[i] = column + 64 * i < p.tokens ? p.chunks : 0;
    }
    a.advance(product.copied_chunk());
    b.advance(product.copied_chunk());
    product.run(2 * slices, a, b, Signs<T>{slices});
  }

  float* const radii = reinterpret_cast<float*>(dynamic_smem + kTile * kPitch);
  float* const lengths = radii + kTile;
  radii[product.thread] = own;
  __syncthreads();
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    const int in_row = product.row(r >> 1, r & 1);
    const float radius = radii[in_row];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const int in_column = product.column(t);
      const float2 length = *reinterpret_cast<const float2*>(lengths + in_column);
      // Rounded one by one, as NumPy does.
      auto bound = [&](float along, float of_key) {
        return __fmul_rn(__fadd_rn(along, __fmul_rn(radius, of_key)), p.scale);
      };
      const float (&c)[4] = product.c[r >> 1][t];
      *reinterpret_cast<u32*>(dynamic_smem + in_row * kPitch + 2 * in_column) =
          pack2<half_t>(bound(c[2 * (r & 1)], length.x), bound(c[2 * (r & 1) + 1], length.y));
    }
  }
  __syncthreads();

  constexpr int kChunks = kTile / 8;
  const int groups = kTile / static_cast<u32>(p.parts);
  const int first_group = first_row / static_cast<u32>(p.parts);
  for (int i = product.thread; i < groups * kChunks; i += Product<T>::kThreads) {
    const int group = i / kChunks;
    const int chunk = i % kChunks;
    if (first_group + group >= p.groups) break;
    const u8* const from = dynamic_smem + group * p.parts * kPitch + 16 * chunk;
    uint4 most = *reinterpret_cast<const uint4*>(from);
    // The last group may have fewer.
    const int parts = min(p.parts, p.rows - first_row - group * p.parts);
    for (int part = 1; part < parts; ++part) {
      const uint4 other = *reinterpret_cast<const uint4*>(from + part * kPitch);
      most.x = max2<half_t>(most.x, other.x);
      most.y = max2<half_t>(most.y, other.y);
      most.z = max2<half_t>(most.z, other.z);
      most.w = max2<half_t>(most.w, other.w);
    }
    u16* const out = p.out + (plane * p.groups + first_group + group) * p.pitch + first_column;
    *reinterpret_cast<uint4*>(out + 8 * chunk) = most;
  }
}

}  // namespace tessera

// The one entry of a specialisation.
#define TESSERA_KEY_BOUNDS(T, WARPS, MIN_CTAS)                                                 \
  static_assert(WARPS == tessera::Product<tessera::T>::kWarps, "the product has eight warps"); \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)                           \
      key_bounds(const __grid_constant__ tessera::KeyBoundsParams params) {                    \
    tessera::key_bounds<tessera::T>(params);                                                   \
  }
