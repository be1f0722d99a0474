// One catalog entry as a shared library: KERNEL is its source, ENTRY the name of its function.
#include "cuda.hpp"
#include KERNEL

namespace tessera {
alignas(1024) u8 dynamic_smem[emulator::kMaxShared];
}

namespace {

// Each thread has a copy of the parameters, as each has its own view of them on a GPU.
template <typename Params>
void call(void (*entry)(Params), const void* params) {
  entry(*static_cast<const Params*>(params));
}

}  // namespace

// Returns null, or what went wrong.
extern "C" const char* emulate(const void* params, unsigned grid_x, unsigned grid_y,
                               unsigned threads, unsigned shared_bytes, unsigned long seed) {
  return emulator::launch([](const void* given) { call(ENTRY, given); }, params,
                          {grid_x, grid_y, 1}, threads, shared_bytes, tessera::dynamic_smem, seed);
}
