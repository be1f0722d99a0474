// When and where tasks run, for the entries that keep time (launch.py asks for them on demand). Of
// the others nothing here is left: their machine code is the same with and without it.
//
// The times are those of %globaltimer, which all multiprocessors share. It counts nanoseconds, but
// in steps: 32 ns on some GPUs, up to a microsecond on others.
#pragma once

#include "common/ptx.cuh"
#include "common/types.cuh"

namespace tessera {

// Of one task, and of one of the parts of a CTA that go through its tasks at their own pace.
struct TaskTime {
  u64 begin;  // ns
  u64 end;
  u64 sm;
};

// What an entry that keeps time is passed: what the others are, and (tasks, parts) times.
template <typename Params>
struct Timed {
  Params params;
  TaskTime* times;
};

// Notes a part's times; one thread of it writes. A task that is taken a second time is noted anew.
struct TaskClock {
  TaskTime* times;  // of the part, for the first task
  int parts;
  bool elected;

  __device__ __forceinline__ TaskClock(TaskTime* all, int part, int of_parts, bool writes)
      : times(all + part), parts(of_parts), elected(writes) {}

  __device__ __forceinline__ void begin(int task) const {
    TaskTime* time = times + static_cast<i64>(task) * parts;
    store_if(&time->sm, multiprocessor(), elected);
    store_if(&time->begin, global_nanoseconds(), elected);
  }
  __device__ __forceinline__ void end(int task) const {
    store_if(&times[static_cast<i64>(task) * parts].end, global_nanoseconds(), elected);
  }
};

// That of the entries that keep no time.
struct NoClock {
  __device__ __forceinline__ NoClock(TaskTime*, int, int, bool) {}
  __device__ __forceinline__ void begin(int) const {}
  __device__ __forceinline__ void end(int) const {}
};

}  // namespace tessera
