// CUDA C++ for the host compiler: what the kernels use of it.
#pragma once

#include <math.h>

#include <algorithm>

#include "machine.hpp"

#define __device__
#define __global__
#define __host__
#define __shared__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(n) __attribute__((aligned(n)))

#define threadIdx (emulator::machine.current->thread)
#define blockIdx (emulator::machine.block)
#define gridDim (emulator::machine.grid)
#define blockDim (emulator::machine.block_size)

using std::max;
using std::min;

struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <typename To, typename From>
inline To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
inline float __int_as_float(int bits) { return same_bits<float>(bits); }
inline int __float_as_int(float x) { return same_bits<int>(x); }
inline float __uint_as_float(unsigned bits) { return same_bits<float>(bits); }
inline unsigned __float_as_uint(float x) { return same_bits<unsigned>(x); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) >> (shift & 31));
}
inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) >>
                               min(shift, 32u));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>(
      ((static_cast<unsigned long long>(high) << 32 | low) << (shift & 31)) >> 32);
}

// The pages beside an array of global memory are out of bounds, and inputs are read-only pages.
template <typename T>
inline T __ldg(const T* address) {
  return *address;
}

inline void __syncthreads() { emulator::bar_sync(0, emulator::machine.threads); }
inline void __syncwarp(unsigned mask = ~0u) {
  emulator::meet_lanes(mask, "__syncwarp", nullptr, [](const void* const*) {});
}

namespace emulator {

struct Vote {
  bool predicate;
  unsigned ballot;
};

inline unsigned ballot(unsigned mask, bool predicate, const char* what) {
  Vote mine{predicate, 0};
  meet_lanes(mask, what, &mine, [mask](const void* const* given) {
    unsigned bits = 0;
    auto vote = [&](int i) { return static_cast<Vote*>(const_cast<void*>(given[i])); };
    for (int i = 0; i < 32; ++i)
      if (mask >> i & 1) bits |= unsigned(vote(i)->predicate) << i;
    for (int i = 0; i < 32; ++i)
      if (mask >> i & 1) vote(i)->ballot = bits;
  });
  return mine.ballot;
}

template <typename T>
struct Shuffle {
  T value;
  int source;
  T result;
};

template <typename T>
inline T shuffle(unsigned mask, T value, int source, const char* what) {
  Shuffle<T> mine{value, source, value};
  if (source < 0 || source > 31 || !(mask >> source & 1))
    fail("%s from lane %d, which the mask %#x lacks", what, source, mask);
  meet_lanes(mask, what, &mine, [mask](const void* const* given) {
    auto of = [&](int i) { return static_cast<Shuffle<T>*>(const_cast<void*>(given[i])); };
    for (int i = 0; i < 32; ++i)
      if (mask >> i & 1) of(i)->result = of(of(i)->source)->value;
  });
  return mine.result;
}

template <typename T, typename Combine>
inline T reduce(unsigned mask, T value, const char* what, Combine combine) {
  meet_lanes(mask, what, &value, [mask, combine](const void* const* given) {
    auto of = [&](int i) { return static_cast<T*>(const_cast<void*>(given[i])); };
    const int first = __builtin_ctz(mask);
    T total = *of(first);
    for (int i = first + 1; i < 32; ++i)
      if (mask >> i & 1) total = combine(total, *of(i));
    for (int i = first; i < 32; ++i)
      if (mask >> i & 1) *of(i) = total;
  });
  return value;
}

}  // namespace emulator

// Of int and unsigned, as on the GPU.
template <typename T>
inline T __reduce_add_sync(unsigned mask, T x) {
  return emulator::reduce(mask, x, "__reduce_add_sync",
                          [](T a, T b) { return T(unsigned(a) + unsigned(b)); });
}
template <typename T>
inline T __reduce_max_sync(unsigned mask, T x) {
  return emulator::reduce(mask, x, "__reduce_max_sync", [](T a, T b) { return max(a, b); });
}
template <typename T>
inline T __reduce_min_sync(unsigned mask, T x) {
  return emulator::reduce(mask, x, "__reduce_min_sync", [](T a, T b) { return min(a, b); });
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned x) {
  return emulator::reduce(mask, x, "__reduce_or_sync",
                          [](unsigned a, unsigned b) { return a | b; });
}

inline unsigned __ballot_sync(unsigned mask, bool on) {
  return emulator::ballot(mask, on, "__ballot_sync");
}
inline int __any_sync(unsigned mask, bool on) {
  return emulator::ballot(mask, on, "__any_sync") != 0;
}
inline int __all_sync(unsigned mask, bool on) {
  return emulator::ballot(mask, on, "__all_sync") == mask;
}
template <typename T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const int first = emulator::lane() & ~(width - 1);
  return emulator::shuffle(mask, value, first + (source & (width - 1)), "__shfl_sync");
}
template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int bits) {
  return emulator::shuffle(mask, value, emulator::lane() ^ bits, "__shfl_xor_sync");
}

// One fiber runs at a time, so that every access is atomic.
template <typename T>
inline T atomicAdd(T* address, T value) {
  const T old = *address;
  *address += value;
  return old;
}
template <typename T>
inline T atomicMax(T* address, T value) {
  const T old = *address;
  *address = max(old, value);
  return old;
}
template <typename T>
inline T atomicOr(T* address, T value) {
  const T old = *address;
  *address |= value;
  return old;
}
// CTAs run one after another.
inline void __threadfence() {}
