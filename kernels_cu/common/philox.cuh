// Numbers that follow from a counter and a key: Philox-4x32-10 of Random123 (Salmon et al., SC11).
// sparsifiers/draws.py computes the same in NumPy.
#pragma once

#include "common/types.cuh"

namespace tessera {

struct PhiloxNumbers {
  u32 word[4];
};

__device__ __forceinline__ PhiloxNumbers philox(u32 c0, u32 c1, u32 c2, u32 c3, u64 key) {
  u32 k0 = static_cast<u32>(key);
  u32 k1 = static_cast<u32>(key >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u64 first = static_cast<u64>(0xd2511f53u) * c0;
    const u64 second = static_cast<u64>(0xcd9e8d57u) * c2;
    c0 = static_cast<u32>(second >> 32) ^ c1 ^ k0;
    c1 = static_cast<u32>(second);
    c2 = static_cast<u32>(first >> 32) ^ c3 ^ k1;
    c3 = static_cast<u32>(first);
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace tessera
