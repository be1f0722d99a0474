// Every PTX instruction that the kernels use, as a named wrapper.
#pragma once

#include "common/types.cuh"

namespace tessera {

__device__ __forceinline__ u32 smem_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// 16 bytes, global to shared, past L1. When `valid` is false the source is not read, whatever its
// address, and zeros are written. No memory clobber: the waits below have it.
__device__ __forceinline__ void cp_async16(u32 destination, u64 source, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination),
               "l"(source), "r"(valid ? 16 : 0));
}

// base + a * b, one instruction.
__device__ __forceinline__ u64 mad_wide(u32 a, u32 b, u64 base) {
  u64 result;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(result) : "r"(a), "r"(b), "l"(base));
  return result;
}

__device__ __forceinline__ void cp_async8(u32 destination, const void* source, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(destination), "l"(source),
               "r"(valid ? 8 : 0)
               : "memory");
}

__device__ __forceinline__ void cp_async4(u32 destination, const void* source, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source),
               "r"(valid ? 4 : 0)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8x8 matrices of 16-bit elements; lanes 8i to 8i+7 give the row addresses of matrix i.
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// c (16x8, float32) += a (16x16) * b (16x8).
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (is_same<T, half_t>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// c (16x8, float32) += a (16x8) * b (8x8) of float32 bits, of which the first 19 count.
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two float32 to one packed register, `low` in the low half, round to nearest even.
template <typename T>
__device__ __forceinline__ u32 pack2(float low, float high) {
  u32 packed;
  if constexpr (is_same<T, half_t>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

// The float32 of a half in the low 16 bits.
__device__ __forceinline__ float half_to_float(u32 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<u16>(bits)));
  return value;
}

// Of two packed elements each: the larger, or the smaller ones; of NaN and a number the number.
template <typename T>
__device__ __forceinline__ u32 max2(u32 a, u32 b) {
  u32 result;
  if constexpr (is_same<T, half_t>) {
    asm("max.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  } else {
    asm("max.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  }
  return result;
}
template <typename T>
__device__ __forceinline__ u32 min2(u32 a, u32 b) {
  u32 result;
  if constexpr (is_same<T, half_t>) {
    asm("min.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  } else {
    asm("min.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  }
  return result;
}

// Of two halves each: 1.0 where that of `a` is at least that of `b`, else 0.
__device__ __forceinline__ u32 halves_from(u32 a, u32 b) {
  u32 result;
  asm("set.ge.f16x2.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
__device__ __forceinline__ u32 add_halves(u32 a, u32 b) {
  u32 result;
  asm("add.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
// Of two halves each: 16 bits that are on where that of `a` is above, or equal to, that of `b`.
__device__ __forceinline__ u32 halves_above(u32 a, u32 b) {
  u32 result;
  asm("set.gt.u32.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
__device__ __forceinline__ u32 halves_at(u32 a, u32 b) {
  u32 result;
  asm("set.eq.u32.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// All threads of the CTA. Unlike __syncthreads, warps may meet here from different places.
__device__ __forceinline__ void barrier_sync() { asm volatile("bar.sync 0;" ::: "memory"); }

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Of a timer that all multiprocessors share, which ticks every 32 ns or more rarely.
__device__ __forceinline__ u64 global_nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

// The number of the multiprocessor that the thread runs on.
__device__ __forceinline__ u32 multiprocessor() {
  u32 number;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(number));
  return number;
}

// A store without a branch.
__device__ __forceinline__ void store_if(u64* address, u64 value, bool writes) {
  asm volatile(
      "{\n.reg .pred writes;\nsetp.ne.b32 writes, %2, 0;\n@writes st.global.u64 [%0], %1;\n}" ::"l"(
          address),
      "l"(value), "r"(static_cast<int>(writes))
      : "memory");
}

// Has a value loaded that nobody here needs.
__device__ __forceinline__ void keep(u32 value) { asm volatile("" ::"r"(value)); }

// The value itself, which ptxas then keeps in a register rather than work it out again.
__device__ __forceinline__ int pinned(int value) {
  int kept;
  asm volatile("mov.b32 %0, %1;" : "=r"(kept) : "r"(value));
  return kept;
}

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float negative_infinity() {
  return __int_as_float(static_cast<int>(0xff800000u));
}

}  // namespace tessera
