// Small kernels, each right or with one fault, to show what the emulator catches.
#include "common/ptx.cuh"
#include "common/ptx_hopper.cuh"
#include "common/types.cuh"

namespace tessera {

enum Fault {
  kNone,
  kNoBarrier,
  kNoWarpBarrier,
  kReadPastInput,
  kWriteInput,
  kWriteBesideOutput,
  kSharedOverrun,
  kBarrierOfOneWarp,
  kDivergedShuffle,
  kNoCopyWait,
  kNoCopyBarrier,
  kWrongParity,
  kNoRelease,
  kTooManyArrivals,
  kLateLane,  // still looks at the phase when the next one is over
  kWrongBytes,
  kNoLoadWait,
  kEarlyRead,
  kEarlyWrite,
  kEarlyOverwrite,
  kNoFence,
  kScaleByWarp,
};

struct alignas(64) FaultParams {
  TensorMap map;  // of 128 rows of 64 float16
  const i32* in;  // 128
  i32* out;       // 128
  i32 scenario;
  i32 fault;
};

struct FaultStorage {
  alignas(1024) u8 tile[2][64 * 128];
  i32 words[128];
  u64 full[2];
  u64 empty[2];
};

// Threads exchange words: over the CTA, over a warp, by shuffle.
__device__ __forceinline__ i32 exchange(const FaultParams& p, FaultStorage& smem) {
  const int thread = threadIdx.x;
  const int lane = thread & 31;
  smem.words[thread] = __ldg(p.in + thread + (p.fault == kReadPastInput ? 1 : 0));
  if (p.fault == kWriteInput) const_cast<i32*>(p.in)[thread] = 0;
  if (p.fault != kNoBarrier && (p.fault != kBarrierOfOneWarp || thread < 32)) barrier_sync();
  const i32 far = smem.words[127 - thread];
  barrier_sync();
  smem.words[thread] = far;
  if (p.fault != kNoWarpBarrier) __syncwarp();
  const i32 near = smem.words[thread ^ 1];
  if (p.fault == kDivergedShuffle && lane == 3) return __any_sync(~0u, near);
  return __shfl_xor_sync(~0u, near, 1);
}

// Each thread copies a word for its neighbour in another warp.
__device__ __forceinline__ i32 copy(const FaultParams& p, FaultStorage& smem) {
  const int thread = threadIdx.x;
  const u32 beyond = p.fault == kSharedOverrun ? sizeof(FaultStorage) : 0;
  cp_async4(smem_address(&smem.words[thread]) + beyond, p.in + thread, true);
  cp_async_commit();
  if (p.fault != kNoCopyWait) cp_async_wait<0>();
  if (p.fault != kNoCopyBarrier) barrier_sync();
  return smem.words[127 - thread];
}

// Warp 0 loads four tiles in turn into two stages; warps 1 to 3 add up one number of each.
__device__ __forceinline__ i32 pipeline(const FaultParams& p, FaultStorage& smem) {
  const int warp = threadIdx.x >> 5;
  const int lane = threadIdx.x & 31;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < 2; ++stage) {
      mbarrier_init(smem_address(&smem.full[stage]), 1);
      mbarrier_init(smem_address(&smem.empty[stage]), 3);
    }
    mbarrier_init_fence();
  }
  barrier_sync();
  u32 sum = 0;
  for (int n = 0; n < 4; ++n) {
    const int stage = n % 2;
    const u32 phase = n / 2 & 1;
    const u32 full = smem_address(&smem.full[stage]);
    const u32 empty = smem_address(&smem.empty[stage]);
    if (warp == 0) {
      mbarrier_wait(empty, p.fault == kWrongParity ? phase : phase ^ 1);
      if (p.fault != kLateLane) __syncwarp();
      if (lane == 0) {
        mbarrier_arrive_expect(full, 8 * 128 + (p.fault == kWrongBytes ? 16 : 0));
        tma_load_4d(smem_address(smem.tile[stage]), &p.map, full, 0, n * 8, 0, 0);
        if (p.fault == kTooManyArrivals) mbarrier_arrive(full);
      }
      __syncwarp();
    } else {
      if (p.fault != kNoLoadWait) mbarrier_wait(full, phase);
      sum += reinterpret_cast<const u16*>(smem.tile[stage])[0];
      __syncwarp();
      if (lane == 0 && p.fault != kNoRelease) mbarrier_arrive(empty);
    }
  }
  return static_cast<i32>(sum);
}

// S = Q Q^T of 64 rows, then S + P Q with P = S in float16; the sum of a thread's S as a number.
__device__ __forceinline__ i32 product(const FaultParams& p, FaultStorage& smem) {
  const u32 full = smem_address(&smem.full[0]);
  if (threadIdx.x == 0) {
    mbarrier_init(full, 1);
    mbarrier_arrive_expect(full, 64 * 128);
    for (int i = 0; i < 8; ++i)
      tma_load_4d(smem_address(smem.tile[0]) + i * 1024, &p.map, full, 0, i * 8, 0, 0);
  }
  barrier_sync();
  mbarrier_wait(full, 0);
  float s[32];
  u32 packed[16];
  const u32 low = descriptor_low(smem_address(smem.tile[0]), 1024);
  for (int i = 0; i < 32; ++i) s[i] = 1.0f;
  if (p.fault != kNoFence) wgmma_fence();
  wgmma_qk(half_t{}, s, descriptor(low, 1024), descriptor(low, 1024));
  for (int k = 1; k < 4; ++k)
    wgmma_qk_add(half_t{}, s, descriptor(low + k * 2, 1024), descriptor(low + k * 2, 1024));
  wgmma_commit();
  if (p.fault == kEarlyOverwrite) reinterpret_cast<u32*>(smem.tile[0])[threadIdx.x] = 0;
  if (p.fault != kEarlyRead) wgmma_wait<0>();
  for (int i = 0; i < 16; ++i) packed[i] = pack2<half_t>(s[2 * i], s[2 * i + 1]);
  wgmma_fence();
  for (int k = 0; k < 4; ++k) {
    const bool accumulate = p.fault != kScaleByWarp || threadIdx.x < 32;
    wgmma_pv(half_t{}, s, packed + 4 * k, descriptor(low + k * 128, 1024), accumulate);
  }
  wgmma_commit();
  if (p.fault == kEarlyWrite)
    for (int i = 0; i < 16; ++i) packed[i] = 0;
  wgmma_wait<0>();
  float sum = 0.0f;
  for (int i = 0; i < 32; ++i) sum += s[i];
  return __float_as_int(sum);
}

}  // namespace tessera

extern "C" __global__ void faults(const __grid_constant__ tessera::FaultParams p) {
  using namespace tessera;
  FaultStorage& smem = *reinterpret_cast<FaultStorage*>(emulator::machine.shared);
  const i32 result = p.scenario == 0   ? exchange(p, smem)
                     : p.scenario == 1 ? copy(p, smem)
                     : p.scenario == 2 ? pipeline(p, smem)
                                       : product(p, smem);
  p.out[threadIdx.x + (p.fault == kWriteBesideOutput && threadIdx.x == 0 ? 128 : 0)] = result;
}
