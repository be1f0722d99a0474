// PTX of Hopper alone: mbarriers, the tensor copy engine, wgmma, register reallocation.
#pragma once

#include "common/types.cuh"

namespace tessera {

__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// The phase also waits for these bytes. Another arrival of the thread's warp must be yet to come.
__device__ __forceinline__ void mbarrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nWAIT:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done "
      "bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void tma_load_4d(u32 target, const TensorMap* map, u32 barrier, int c0,
                                            int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4, %5, %6}], [%2];" ::"r"(target),
      "l"(reinterpret_cast<u64>(map)), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

__device__ __forceinline__ void tma_load_5d(u32 target, const TensorMap* map, u32 barrier, int row,
                                            int group, int head) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
      "%4, %3, %5, %6}], [%2];" ::"r"(target),
      "l"(reinterpret_cast<u64>(map)), "r"(barrier), "r"(0), "r"(row), "r"(group), "r"(head)
      : "memory");
}

// Arrives at a barrier once all copies by cp_async16 of this thread so far are complete.
__device__ __forceinline__ void cp_async_arrive(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// The same into the shared memory of all CTAs in the mask, each of which counts the bytes at its
// own barrier.
__device__ __forceinline__ void tma_multicast_4d(u32 target, const TensorMap* map, u32 barrier,
                                                 u16 ctas, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes."
      "multicast::cluster [%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(target),
      "l"(reinterpret_cast<u64>(map)), "r"(barrier), "h"(ctas), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

__device__ __forceinline__ void tma_multicast_5d(u32 target, const TensorMap* map, u32 barrier,
                                                 u16 ctas, int row, int group, int head) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes."
      "multicast::cluster [%0], [%1, {%4, %5, %4, %6, %7}], [%2], %3;" ::"r"(target),
      "l"(reinterpret_cast<u64>(map)), "r"(barrier), "h"(ctas), "r"(0), "r"(row), "r"(group),
      "r"(head)
      : "memory");
}

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of the cluster.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

// Arrives at the barrier of another CTA of the cluster that has this one's address there.
__device__ __forceinline__ void mbarrier_arrive_remote(u32 barrier, u32 rank) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

__device__ __forceinline__ void mbarrier_wait_cluster(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nWAIT:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, "
      "[%0], %1;\n@done bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Orders ordinary accesses to shared memory before those of the copy engine and wgmma.
__device__ __forceinline__ void async_proxy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void nanosleep() { asm volatile("nanosleep.u32 1;" ::: "memory"); }

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Shared-memory matrix descriptor, 128-byte swizzle. The low word (address and leading stride, in
// 16-byte units) is all that moves from product to product.
__device__ __forceinline__ u32 descriptor_low(u32 address, u32 leading) {
  return ((address & 0x3FFFFu) >> 4) | ((leading >> 4) << 16);
}

__device__ __forceinline__ u64 descriptor(u32 low, u32 stride) {
  u64 packed;
  asm("mov.b64 %0, {%1, %2};" : "=l"(packed) : "r"(low), "r"((stride >> 4) | (1u << 30)));
  return packed;
}

// Operands and constraints of a product whose accumulator is 32, 64 or 96 registers a thread, two
// columns each: N = 64, 128 or 192.
#define TESSERA_R8(v, i)                                                                      \
  "+f"(v[i]), "+f"(v[i + 1]), "+f"(v[i + 2]), "+f"(v[i + 3]), "+f"(v[i + 4]), "+f"(v[i + 5]), \
      "+f"(v[i + 6]), "+f"(v[i + 7])
#define TESSERA_R32(v) TESSERA_R8(v, 0), TESSERA_R8(v, 8), TESSERA_R8(v, 16), TESSERA_R8(v, 24)
#define TESSERA_R64(v) \
  TESSERA_R32(v), TESSERA_R8(v, 32), TESSERA_R8(v, 40), TESSERA_R8(v, 48), TESSERA_R8(v, 56)
#define TESSERA_R96(v) \
  TESSERA_R64(v), TESSERA_R8(v, 64), TESSERA_R8(v, 72), TESSERA_R8(v, 80), TESSERA_R8(v, 88)
#define TESSERA_D32                                                                            \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24," \
  "%25,%26,%27,%28,%29,%30,%31"
#define TESSERA_D64                                                                                \
  TESSERA_D32                                                                                      \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%" \
  "55,%56,%57,%58,%59,%60,%61,%62,%63"
#define TESSERA_D96                                                                                \
  TESSERA_D64                                                                                      \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%" \
  "87,%88,%89,%90,%91,%92,%93,%94,%95"

// For an element type:
//   wgmma_qk      S (64 x N) = a (64 x 16, shared) * b (N x 16, shared)
//   wgmma_qk_add  S += a * b
//   wgmma_pv      O (64 x N) = a (64 x 16, registers) * b (16 x N, row-major in shared memory) + O,
//                 or without O; the predicate costs two moves to uniform registers
//   wgmma_pv_add  O += a * b
// COUNT registers of an accumulator are N columns; the operands that follow them have the numbers
// that the macros take.
#define TESSERA_WGMMA_QK(NAME, T, TYPE, COUNT, N, A, B, ADD)                     \
  __device__ __forceinline__ void NAME(T, float (&c)[COUNT], u64 a, u64 b) {     \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE \
                 " {" TESSERA_D##COUNT "}, " A ", " B ", " ADD ", 1, 1, 0, 0;"   \
                 : TESSERA_R##COUNT(c)                                           \
                 : "l"(a), "l"(b));                                              \
  }
#define TESSERA_WGMMA_PV(T, TYPE, COUNT, N, A, B, ADD)                                           \
  __device__ __forceinline__ void wgmma_pv(T, float (&c)[COUNT], const u32* a, u64 b, int add) { \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADD                                         \
                 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE           \
                 " {" TESSERA_D##COUNT "}, {" A "}, " B ", p, 1, 1, 1;\n}"                       \
                 : TESSERA_R##COUNT(c)                                                           \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                \
  }                                                                                              \
  __device__ __forceinline__ void wgmma_pv_add(T, float (&c)[COUNT], const u32* a, u64 b) {      \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE                 \
                 " {" TESSERA_D##COUNT "}, {" A "}, " B ", 1, 1, 1, 1;"                          \
                 : TESSERA_R##COUNT(c)                                                           \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                          \
  }
#define TESSERA_WGMMA(T, TYPE)                                        \
  TESSERA_WGMMA_QK(wgmma_qk, T, TYPE, 64, 128, "%64", "%65", "0")     \
  TESSERA_WGMMA_QK(wgmma_qk_add, T, TYPE, 64, 128, "%64", "%65", "1") \
  TESSERA_WGMMA_QK(wgmma_qk, T, TYPE, 96, 192, "%96", "%97", "0")     \
  TESSERA_WGMMA_QK(wgmma_qk_add, T, TYPE, 96, 192, "%96", "%97", "1") \
  TESSERA_WGMMA_PV(T, TYPE, 32, 64, "%32,%33,%34,%35", "%36", "%37")  \
  TESSERA_WGMMA_PV(T, TYPE, 64, 128, "%64,%65,%66,%67", "%68", "%69")

TESSERA_WGMMA(half_t, "f16")
TESSERA_WGMMA(bf16_t, "bf16")

}  // namespace tessera
