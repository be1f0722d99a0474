// The tasks of the heads that took one route: one head's list, written for each of them in turn.
//
//   tasks[rank * n + i] = base[i] with the head's number,  rank = heads before it on that route
//   counts[kTasks] = n * heads on the route
//
// A CTA a head, which counts the heads before it; a thread a task. Heads are few, and their routes
// come from L1. Expected on an H200, a prediction: 40 heads x 591 tasks of 48 bytes, 3 us.
#pragma once

#include "common/builders.cuh"
#include "common/types.cuh"

namespace tessera {

struct RouteTasksParams {
  const Task* base;  // (base_tasks), of one head
  const i32* route;  // (heads)
  Task* tasks;       // room for heads * base_tasks
  i64* counts;       // TileCount
  i32 base_tasks;
  i32 heads;
  i32 taken;  // the route whose heads are listed
};

template <int kWarps>
__device__ __forceinline__ void route_tasks(const RouteTasksParams& p) {
  const int head = blockIdx.x;
  const int lane = threadIdx.x & 31;
  const bool mine = p.route[head] == p.taken;
  int rank = 0;
  for (int before = lane; before < head; before += 32) rank += p.route[before] == p.taken;
#pragma unroll
  for (int other = 16; other > 0; other /= 2) rank += __shfl_xor_sync(kAllLanes, rank, other);
  if (head == p.heads - 1 && threadIdx.x < 8) {
    const i64 tasks = static_cast<i64>(rank + mine) * p.base_tasks;
    p.counts[threadIdx.x] = threadIdx.x == kTasks ? tasks : 0;
  }
  if (!mine) return;
  Task* const tasks = p.tasks + static_cast<i64>(rank) * p.base_tasks;
  for (int i = threadIdx.x; i < p.base_tasks; i += 32 * kWarps) {
    Task task = p.base[i];
    task.head = head;
    tasks[i] = task;
  }
}

}  // namespace tessera

// The one entry of a specialisation.
#define TESSERA_ROUTE_TASKS(WARPS, MIN_CTAS)                                  \
  extern "C" __global__ void __launch_bounds__(WARPS * 32, MIN_CTAS)          \
      route_tasks(const __grid_constant__ tessera::RouteTasksParams params) { \
    tessera::route_tasks<WARPS>(params);                                      \
  }
