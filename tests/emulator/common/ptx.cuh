// kernels_cu/common/ptx.cuh for the emulator: the same names, the semantics that PTX gives them.
#pragma once

#include "common/types.cuh"
#include "cuda.hpp"

namespace emulator {

// Numbers of 16 bits. Tables, since a product converts many.
template <typename T>
constexpr bool kIsHalf = tessera::is_same<T, tessera::half_t>;

inline float half_value(unsigned bits) {
  const unsigned exponent = bits >> 10 & 31;
  const unsigned fraction = bits & 1023;
  const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                     : exponent     ? ldexpf(1024 + fraction, int(exponent) - 25)
                                    : ldexpf(fraction, -24);
  return bits >> 15 ? -size : size;
}

struct HalfValues {
  float of[65536];
  HalfValues() {
    for (unsigned bits = 0; bits < 65536; ++bits) of[bits] = half_value(bits);
  }
};
inline const HalfValues half_values;

template <typename T>
inline float value(unsigned bits) {
  if constexpr (kIsHalf<T>) {
    return half_values.of[bits & 0xffff];
  } else {
    return same_bits<float>(bits << 16);
  }
}

// To nearest, ties to even.
template <typename T>
inline unsigned rounded(float x) {
  const unsigned bits = same_bits<unsigned>(x);
  if (x != x) return 0x7fff;
  if constexpr (kIsHalf<T>) {
    const unsigned sign = bits >> 16 & 0x8000;
    const float size = fabsf(x);
    if (size >= 65520.0f) return sign | 0x7c00;
    // In steps of the result's last place; the default mode of the host rounds ties to even.
    int exponent = -14;
    if (size >= 0x1p-14f) exponent = ilogbf(size);
    const unsigned steps = static_cast<unsigned>(nearbyintf(ldexpf(size, 10 - exponent)));
    return sign | (static_cast<unsigned>(exponent + 14) * 1024 + steps);
  } else {
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
}

template <typename Of>
inline unsigned both_halves(unsigned a, unsigned b, Of of) {
  return of(a & 0xffff, b & 0xffff) | of(a >> 16, b >> 16) << 16;
}

// cp.async. A copy may land at any time until its thread waits for its group.
struct Copy {
  unsigned target;
  const void* source;
  unsigned bytes;
  bool valid;
  unsigned group;
  unsigned number;  // of the thread's copies
};

// What follows once a thread's first so many copies have landed.
struct Afterwards {
  unsigned copies;
  std::function<void()> then;
};

class Copies : public Background {
 public:
  Copies() { machine.background.push_back(this); }

  void start(unsigned target, const void* source, unsigned bytes, bool valid) {
    std::uint8_t* const to = shared_at(target, bytes, bytes, "cp.async");
    if (valid && reinterpret_cast<std::uintptr_t>(source) % bytes)
      fail("cp.async: global address %p is no multiple of %u", source, bytes);
    const Copy copy{target, source, bytes, valid, group_[number()], started_[number()]++};
    if (machine.landing == Machine::kEarly) return finish(copy);
    memset(to, 0xff, bytes);
    pending_[number()].push_back(copy);
  }

  void commit() { ++group_[number()]; }

  // Calls `then` once all copies that the thread has started have landed.
  void after(std::function<void()> then) {
    afterwards_[number()].push_back({started_[number()], std::move(then)});
    settle(number());
  }

  void wait(unsigned newest) {
    std::vector<Copy>& own = pending_[number()];
    size_t kept = 0;
    for (size_t i = 0; i < own.size(); ++i) {
      if (own[i].group + newest < group_[number()]) {
        finish(own[i]);
      } else {
        own[kept++] = own[i];
      }
    }
    own.resize(kept);
    settle(number());
  }

  bool land(unsigned random) override {
    for (int i = 0; i < machine.threads; ++i) {
      const int thread = (random + i) % machine.threads;
      std::vector<Copy>& copies = pending_[thread];
      if (copies.empty()) continue;
      std::swap(copies[random / 1024 % copies.size()], copies.back());
      const Copy copy = copies.back();
      copies.pop_back();
      finish(copy);
      settle(thread);
      return true;
    }
    return false;
  }

  void clear() {
    for (int i = 0; i < kMaxThreads; ++i) {
      pending_[i].clear();
      afterwards_[i].clear();
      group_[i] = started_[i] = 0;
    }
  }

 private:
  static void finish(const Copy& copy) {
    if (copy.valid) {
      memcpy(machine.shared + copy.target, copy.source, copy.bytes);
    } else {
      memset(machine.shared + copy.target, 0, copy.bytes);
    }
  }

  void settle(int thread) {
    std::vector<Afterwards>& waiting = afterwards_[thread];
    for (size_t i = 0; i < waiting.size();) {
      bool landed = true;
      for (const Copy& copy : pending_[thread]) landed &= copy.number >= waiting[i].copies;
      if (!landed) {
        ++i;
        continue;
      }
      const std::function<void()> then = waiting[i].then;
      waiting.erase(waiting.begin() + i);
      then();
    }
  }

  std::vector<Copy> pending_[kMaxThreads];
  std::vector<Afterwards> afterwards_[kMaxThreads];
  unsigned group_[kMaxThreads] = {};
  unsigned started_[kMaxThreads] = {};
};
inline Copies copies;
inline const bool copies_are_cleared = (at_start.push_back([] { copies.clear(); }), true);

inline void ldmatrix(unsigned (&r)[4], unsigned address, bool transposed) {
  struct Lane {
    unsigned address;
    unsigned* r;
  } mine{address, r};
  meet_lanes(~0u, "ldmatrix", &mine, [transposed](const void* const* given) {
    auto lane = [&](int i) { return static_cast<const Lane*>(given[i]); };
    for (int matrix = 0; matrix < 4; ++matrix) {
      std::uint16_t rows[8][8];
      for (int row = 0; row < 8; ++row)
        memcpy(rows[row], shared_at(lane(8 * matrix + row)->address, 16, 16, "ldmatrix"), 16);
      for (int i = 0; i < 32; ++i) {
        const int major = i / 4, minor = i % 4 * 2;
        const unsigned low = transposed ? rows[minor][major] : rows[major][minor];
        const unsigned high = transposed ? rows[minor + 1][major] : rows[major][minor + 1];
        lane(i)->r[matrix] = low | high << 16;
      }
    }
  });
}

template <typename T>
inline void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  struct Lane {
    float* c;
    const unsigned* a;
    unsigned b[2];
  } mine{c, a, {b0, b1}};
  meet_lanes(~0u, "mma.m16n8k16", &mine, [](const void* const* given) {
    float left[16][16], right[16][8];
    for (int i = 0; i < 32; ++i) {
      const Lane& lane = *static_cast<const Lane*>(given[i]);
      const int group = i / 4, pair = i % 4 * 2;
      for (int e = 0; e < 8; ++e)
        left[group + 8 * (e / 2 % 2)][pair + 8 * (e / 4) + e % 2] =
            value<T>(lane.a[e / 2] >> 16 * (e % 2) & 0xffff);
      for (int e = 0; e < 4; ++e)
        right[pair + 8 * (e / 2) + e % 2][group] = value<T>(lane.b[e / 2] >> 16 * (e % 2) & 0xffff);
    }
    float sum[16][8] = {};
    for (int row = 0; row < 16; ++row)
      for (int k = 0; k < 16; ++k)
        for (int column = 0; column < 8; ++column)
          sum[row][column] += left[row][k] * right[k][column];
    for (int i = 0; i < 32; ++i)
      for (int e = 0; e < 4; ++e)
        static_cast<const Lane*>(given[i])->c[e] += sum[i / 4 + 8 * (e / 2)][i % 4 * 2 + e % 2];
  });
}

inline void mma_tf32(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  struct Lane {
    float* c;
    const unsigned* a;
    unsigned b[2];
  } mine{c, a, {b0, b1}};
  meet_lanes(~0u, "mma.m16n8k8", &mine, [](const void* const* given) {
    auto number = [](unsigned bits) { return same_bits<float>(bits & 0xffffe000u); };
    float left[16][8], right[8][8];
    for (int i = 0; i < 32; ++i) {
      const Lane& lane = *static_cast<const Lane*>(given[i]);
      for (int e = 0; e < 4; ++e)
        left[i / 4 + 8 * (e % 2)][i % 4 + 4 * (e / 2)] = number(lane.a[e]);
      for (int e = 0; e < 2; ++e) right[i % 4 + 4 * e][i / 4] = number(lane.b[e]);
    }
    for (int i = 0; i < 32; ++i)
      for (int e = 0; e < 4; ++e) {
        float sum = 0.0f;
        for (int k = 0; k < 8; ++k)
          sum += left[i / 4 + 8 * (e / 2)][k] * right[k][i % 4 * 2 + e % 2];
        static_cast<const Lane*>(given[i])->c[e] += sum;
      }
  });
}

}  // namespace emulator

namespace tessera {

inline u32 smem_address(const void* pointer) {
  const auto offset = static_cast<const u8*>(pointer) - emulator::machine.shared;
  if (offset < 0 || offset > emulator::machine.shared_bytes)
    emulator::fail("smem_address of %p, which is not in shared memory", pointer);
  return static_cast<u32>(offset);
}

inline void cp_async16(u32 destination, u64 source, bool valid) {
  emulator::copies.start(destination, reinterpret_cast<const void*>(source), 16, valid);
}
inline void cp_async8(u32 destination, const void* source, bool valid) {
  emulator::copies.start(destination, source, 8, valid);
}
inline void cp_async4(u32 destination, const void* source, bool valid) {
  emulator::copies.start(destination, source, 4, valid);
}
inline void cp_async_commit() { emulator::copies.commit(); }
template <int kPending>
inline void cp_async_wait() {
  emulator::copies.wait(kPending);
}

inline u64 mad_wide(u32 a, u32 b, u64 base) { return static_cast<u64>(a) * b + base; }

inline void ldmatrix_x4(u32 (&r)[4], u32 address) { emulator::ldmatrix(r, address, false); }
inline void ldmatrix_x4_trans(u32 (&r)[4], u32 address) { emulator::ldmatrix(r, address, true); }

template <typename T>
inline void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  emulator::mma<T>(c, a, b0, b1);
}

inline void mma_m16n8k8_tf32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  emulator::mma_tf32(c, a, b0, b1);
}

template <typename T>
inline u32 pack2(float low, float high) {
  return emulator::rounded<T>(low) | emulator::rounded<T>(high) << 16;
}

template <typename T>
inline u32 max2(u32 a, u32 b) {
  return emulator::both_halves(a, b, [](u32 x, u32 y) {
    const float left = emulator::value<T>(x), right = emulator::value<T>(y);
    return left != left || right > left || (right == left && left == 0 && x >> 15) ? y : x;
  });
}
template <typename T>
inline u32 min2(u32 a, u32 b) {
  return emulator::both_halves(a, b, [](u32 x, u32 y) {
    const float left = emulator::value<T>(x), right = emulator::value<T>(y);
    return left != left || right < left || (right == left && left == 0 && y >> 15) ? y : x;
  });
}
inline u32 halves_from(u32 a, u32 b) {
  return emulator::both_halves(a, b, [](u32 x, u32 y) {
    return emulator::half_value(x) >= emulator::half_value(y) ? 0x3c00u : 0u;
  });
}
inline u32 add_halves(u32 a, u32 b) {
  return emulator::both_halves(a, b, [](u32 x, u32 y) {
    return emulator::rounded<half_t>(emulator::half_value(x) + emulator::half_value(y));
  });
}
inline u32 halves_above(u32 a, u32 b) {
  return emulator::both_halves(a, b, [](u32 x, u32 y) {
    return emulator::half_value(x) > emulator::half_value(y) ? 0xffffu : 0u;
  });
}
inline u32 halves_at(u32 a, u32 b) {
  return emulator::both_halves(a, b, [](u32 x, u32 y) {
    return emulator::half_value(x) == emulator::half_value(y) ? 0xffffu : 0u;
  });
}

inline void barrier_sync() { emulator::bar_sync(0, emulator::machine.threads); }
inline int pinned(int value) { return value; }
inline float exp2_approx(float x) {  // .ftz: subnormal results are zeros
  const float y = exp2f(x);
  return y < 1.17549435e-38f ? 0.0f : y;
}
inline float half_to_float(u32 bits) { return emulator::half_value(bits & 0xffff); }
inline float log2_approx(float x) { return log2f(x); }
inline void keep(u32) {}
// A timer that ticks when it is read, and as many multiprocessors as the emulated GPU has.
inline u64 global_nanoseconds() {
  static u64 now = u64(1) << 60;
  return now += 32;
}
inline u32 multiprocessor() { return emulator::machine.block.x % 3; }
inline void store_if(u64* address, u64 value, bool writes) {
  if (writes) *address = value;
}
inline float negative_infinity() { return -INFINITY; }

}  // namespace tessera
