// kernels_cu/common/ptx_hopper.cuh for the emulator: mbarriers, the tensor copy engine, wgmma.
#pragma once

#include <deque>
#include <memory>

#include "common/ptx.cuh"
#include "common/types.cuh"
#include "cuda.hpp"

namespace emulator {

// An mbarrier. Its 8 bytes of shared memory hold a mark that nothing may overwrite.
struct Mbarrier {
  unsigned count;    // arrivals of a phase
  unsigned missing;  // arrivals that this phase still waits for
  long bytes = 0;    // bytes that it still waits for
  unsigned phase = 0;
};
inline std::map<unsigned, Mbarrier> mbarriers;  // by shared address
constexpr std::uint64_t kMark = 0x6d62617272696572ull;
inline const bool mbarriers_are_told = (at_deadlock.push_back([] {
  for (const auto& [address, barrier] : mbarriers)
    say("\n  mbarrier at shared byte %#x: phase %u waits for %u of %u arrivals and %ld bytes",
        address, barrier.phase, barrier.missing, barrier.count, barrier.bytes);
}),
                                        true);

inline Mbarrier& mbarrier_at(unsigned address) {
  const auto found = mbarriers.find(address);
  if (found == mbarriers.end()) fail("mbarrier %#x was never initialised", address);
  if (memcmp(shared_at(address, 8, 8, "mbarrier"), &kMark, 8))
    fail("mbarrier %#x was overwritten", address);
  return found->second;
}

inline void turn_if_complete(Mbarrier& barrier) {
  if (barrier.missing || barrier.bytes) return;
  barrier.missing = barrier.count;
  ++barrier.phase;
  wake(&barrier);
}

// By a thread, or by a copy that has landed while nobody runs.
inline void count_arrival(unsigned address, long bytes) {
  Mbarrier& barrier = mbarrier_at(address);
  if (barrier.missing == 0)
    fail("mbarrier %#x: more than %u arrivals in a phase", address, barrier.count);
  barrier.bytes += bytes;
  --barrier.missing;
  turn_if_complete(barrier);
}

inline void arrive(unsigned address, long bytes) {
  count_arrival(address, bytes);
  maybe_switch();
}

// What tests put into a TensorMap in place of what the driver would.
struct MapContents {
  std::uint64_t mark;  // kMapMark
  const char* base;
  std::uint64_t strides[4];  // bytes, of every axis but the innermost
  std::uint32_t sizes[5];    // elements, the innermost axis first
  std::uint32_t box[5];
  std::uint32_t rank;
};
static_assert(sizeof(MapContents) <= sizeof(tessera::TensorMap));
constexpr std::uint64_t kMapMark = 0x7465737365726121ull;

inline unsigned swizzled_128(unsigned address) { return address ^ (address >> 3 & 0x70); }

// Loads of the tensor copy engine.
class Loads : public Background {
 public:
  Loads() { machine.background.push_back(this); }

  void start(unsigned target, const tessera::TensorMap* map, unsigned barrier, unsigned rank,
             const int (&at)[5]) {
    Load load{target, barrier, 2, {}, {}};
    memcpy(&load.map, map, sizeof load.map);
    if (load.map.mark != kMapMark) fail("a load through a tensor map that was never encoded");
    if (load.map.rank != rank) fail("a load of %u axes through a map of %u", rank, load.map.rank);
    for (unsigned i = 0; i < rank; ++i) load.bytes *= load.map.box[i];
    memcpy(load.at, at, sizeof at);
    memset(shared_at(target, load.bytes, 128, "tensor load"), 0xff, load.bytes);
    mbarrier_at(barrier);
    if (machine.landing == Machine::kEarly) return finish(load);
    pending_.push_back(load);
  }

  bool land(unsigned random) override {
    if (pending_.empty()) return false;
    std::swap(pending_[random % pending_.size()], pending_.back());
    const Load load = pending_.back();
    pending_.pop_back();
    finish(load);
    return true;
  }

  void clear() { pending_.clear(); }
  bool idle() const { return pending_.empty(); }

 private:
  struct Load {
    unsigned target;
    unsigned barrier;
    unsigned bytes;
    MapContents map;
    int at[5];
  };

  static void finish(const Load& load) {
    const MapContents& map = load.map;
    const unsigned row_bytes = map.box[0] * 2;
    for (unsigned row = 0; row < load.bytes / row_bytes; ++row) {
      const char* source = map.base;
      bool inside = true;
      unsigned rest = row;
      for (unsigned axis = 1; axis < map.rank; ++axis) {
        const long at = load.at[axis] + long(rest % map.box[axis]);
        rest /= map.box[axis];
        inside = inside && at >= 0 && at < long(map.sizes[axis]);
        source += at * long(map.strides[axis - 1]);
      }
      for (unsigned x = 0; x < map.box[0]; ++x) {
        const long at = load.at[0] + long(x);
        std::uint8_t* const to =
            machine.shared + swizzled_128(load.target + row * row_bytes + x * 2);
        if (inside && at >= 0 && at < long(map.sizes[0])) {
          memcpy(to, source + at * 2, 2);
        } else {
          memset(to, 0, 2);
        }
      }
    }
    Mbarrier& barrier = mbarrier_at(load.barrier);
    barrier.bytes -= load.bytes;
    turn_if_complete(barrier);
  }

  std::vector<Load> pending_;
};
inline Loads loads;

// Matrix descriptors of 128-byte swizzle.
struct Descriptor {
  unsigned start, leading, stride;  // bytes
  explicit Descriptor(std::uint64_t bits)
      : start((bits & 0x3fff) << 4),
        leading((bits >> 16 & 0x3fff) << 4),
        stride((bits >> 32 & 0x3fff) << 4) {
    if (bits >> 62 != 1)
      fail("wgmma: the descriptor %#llx is not of 128-byte swizzle", (unsigned long long)bits);
  }
  // Element (row, k), rows of 128 bytes along k, 8 rows an atom.
  unsigned along_k(unsigned row, unsigned k) const {
    return swizzled_128(start + row / 8 * stride + row % 8 * 128 + k * 2);
  }
  // Element (k, column), rows of 64 columns, 8 values of k an atom.
  unsigned across_k(unsigned k, unsigned column) const {
    return swizzled_128(start + column / 64 * leading + k / 8 * stride + k % 8 * 128 +
                        column % 64 * 2);
  }
};

inline std::uint16_t shared_word(unsigned address) {
  std::uint16_t word;
  memcpy(&word, shared_at(address, 2, 2, "wgmma"), 2);
  return word;
}

// What a wgmma is, apart from whose registers it takes: the same for all warps of a warpgroup.
struct Instruction {
  const char* what;
  std::uint64_t a, b;
  bool accumulate;
};

// The instructions of a warpgroup, in order. The hardware runs one when its four warps have come;
// each warp's quarter runs by itself here, so that no kernel leans on wgmma as on a barrier.
struct Agreement {
  std::vector<Instruction> agreed;
  size_t issued[4] = {};

  void check(int warp, const Instruction& mine) {
    const size_t n = issued[warp % 4]++;
    if (n == agreed.size()) return agreed.push_back(mine);
    const Instruction& other = agreed[n];
    if (mine.what != other.what)
      fail("%s, where another warp of the warpgroup has %s", mine.what, other.what);
    if (mine.a != other.a || mine.b != other.b)
      fail("%s: descriptors differ between warps", mine.what);
    if (mine.accumulate != other.accumulate) fail("%s: scale-d differs between warps", mine.what);
  }
  void check_end() const {
    for (size_t n : issued)
      if (n != agreed.size()) fail("a wgmma was left out by some warps of a warpgroup");
  }
};
inline Agreement agreements[kMaxWarps / 4];

// One warp's part of the products of its warpgroup: 16 rows. Registers of accumulators are NaN from
// the issue on, and get their values when the group is waited for; operands are read some time in
// between.
class Products : public Background {
 public:
  struct Registers {  // of 32 lanes
    float* of[32];
    int count;
    std::vector<float> values;
  };
  struct Product {
    Registers* c;
    const unsigned* a[32];  // null: from shared memory
    Instruction instruction;
    int first_row;
    float (*value)(unsigned);
  };

  Products() { machine.background.push_back(this); }

  void fence(int lane) {
    fenced_[lane] = true;
    for (auto& entry : seen_[lane])
      memcpy(entry.second.data(), entry.first, 4 * entry.second.size());
  }

  // Fails for a register that was written after the last fence.
  void check_fenced(int lane, const float* registers, size_t count) {
    if (!fenced_[lane]) fail("wgmma without a wgmma.fence before it");
    auto& seen = seen_[lane];
    const auto found = seen.find(registers);
    if (found == seen.end()) {
      seen[registers].assign(registers, registers + count);
    } else if (memcmp(found->second.data(), registers, 4 * count)) {
      fail("wgmma reads registers that were written after the last wgmma.fence");
    }
  }

  Registers* under_way(int lane, const float* c) {
    for (auto& registers : registers_)
      if (registers->of[lane] == c) return registers.get();
    return nullptr;
  }

  void issue(Product product, float* const (&c)[32], int count) {
    product.c = under_way(0, c[0]);
    if (!product.c) {
      registers_.push_back(std::make_unique<Registers>());
      product.c = registers_.back().get();
      product.c->count = count;
      product.c->values.resize(32 * count);
      for (int i = 0; i < 32; ++i) {
        product.c->of[i] = c[i];
        memcpy(&product.c->values[i * count], c[i], 4 * count);
        memset(c[i], 0xff, 4 * count);
      }
    }
    open_.products.push_back(product);
  }

  void commit() {
    groups_.push_back(std::move(open_));
    open_ = {};
    if (machine.landing == Machine::kEarly) compute(groups_.back());
  }

  void wait(size_t newest) {
    while (groups_.size() > newest) {
      compute(groups_.front());
      const Group done = std::move(groups_.front());
      groups_.pop_front();
      for (const Product& product : done.products) write_back(product.c);
    }
  }

  bool land(unsigned) override {
    for (Group& group : groups_) {
      if (group.computed) continue;
      compute(group);
      return true;
    }
    return false;
  }

  bool idle() const { return groups_.empty() && open_.products.empty(); }

  void clear() {
    groups_.clear();
    open_ = {};
    registers_.clear();
    for (int i = 0; i < 32; ++i) {
      fenced_[i] = false;
      seen_[i].clear();
    }
  }

 private:
  struct Group {
    std::vector<Product> products;
    bool computed = false;
  };

  bool still_used(const Registers* c) const {
    auto uses = [c](const Group& group) {
      return std::any_of(group.products.begin(), group.products.end(),
                         [c](const Product& product) { return product.c == c; });
    };
    return uses(open_) || std::any_of(groups_.begin(), groups_.end(), uses);
  }

  // Once, when no younger product adds to the same registers.
  void write_back(Registers* c) {
    for (auto& registers : registers_) {
      if (registers.get() != c || still_used(c)) continue;
      for (int i = 0; i < 32; ++i) {
        memcpy(c->of[i], &c->values[i * c->count], 4 * c->count);
        memcpy(seen_[i][c->of[i]].data(), c->of[i], 4 * c->count);
      }
      std::swap(registers, registers_.back());
      registers_.pop_back();
      return;
    }
  }

  static void compute(Group& group) {
    if (group.computed) return;
    group.computed = true;
    for (const Product& product : group.products) multiply(product);
  }

  static void multiply(const Product& p) {
    const int columns = p.c->count * 2;
    float left[16][16];
    static float right[16][256];
    const Descriptor b(p.instruction.b);
    if (p.a[0]) {
      for (int lane = 0; lane < 32; ++lane)
        for (int e = 0; e < 8; ++e)
          left[lane / 4 + 8 * (e / 2 % 2)][lane % 4 * 2 + 8 * (e / 4) + e % 2] =
              p.value(p.a[lane][e / 2] >> 16 * (e % 2) & 0xffff);
      for (int k = 0; k < 16; ++k)
        for (int column = 0; column < columns; ++column)
          right[k][column] = p.value(shared_word(b.across_k(k, column)));
    } else {
      const Descriptor a(p.instruction.a);
      for (int row = 0; row < 16; ++row)
        for (int k = 0; k < 16; ++k)
          left[row][k] = p.value(shared_word(a.along_k(p.first_row + row, k)));
      for (int column = 0; column < columns; ++column)
        for (int k = 0; k < 16; ++k) right[k][column] = p.value(shared_word(b.along_k(column, k)));
    }
    static float sum[16][256];
    for (int row = 0; row < 16; ++row) {
      for (int column = 0; column < columns; ++column) sum[row][column] = 0.0f;
      for (int k = 0; k < 16; ++k)
        for (int column = 0; column < columns; ++column)
          sum[row][column] += left[row][k] * right[k][column];
    }
    for (int lane = 0; lane < 32; ++lane) {
      float* const c = &p.c->values[lane * p.c->count];
      for (int i = 0; i < p.c->count; ++i) {
        const float x = sum[lane / 4 + 8 * (i / 2 % 2)][i / 4 * 8 + lane % 4 * 2 + i % 2];
        c[i] = p.instruction.accumulate ? c[i] + x : x;
      }
    }
  }

  std::deque<Group> groups_;
  Group open_;
  std::vector<std::unique_ptr<Registers>> registers_;
  bool fenced_[32] = {};
  std::map<const float*, std::vector<float>> seen_[32];
};
inline Products products[kMaxWarps];

inline const bool hopper_is_cleared =
    (at_start.push_back([] {
      mbarriers.clear();
      loads.clear();
      for (Products& p : products) p.clear();
      for (Agreement& a : agreements) a = {};
    }),
     at_end.push_back([] {
       if (!loads.idle()) fail("the CTA ended before a tensor load that it started");
       for (Products& p : products)
         if (!p.idle()) fail("the CTA ended before a wgmma that it started");
       for (Agreement& a : agreements) a.check_end();
     }),
     true);

// c += or = a * b, `a` from registers or by descriptor.
template <typename T, int kCount>
inline void wgmma(float (&c)[kCount], const unsigned* a, const Instruction& instruction) {
  struct Lane {
    float* c;
    const unsigned* a;
    const Instruction* instruction;
  } mine{c, a, &instruction};
  Products& own = products[warp()];
  if (!own.under_way(lane(), c)) own.check_fenced(lane(), c, kCount);
  if (a) own.check_fenced(lane(), reinterpret_cast<const float*>(a), 4);
  meet_lanes(~0u, instruction.what, &mine, [&own](const void* const* given) {
    Products::Product product{};
    product.value = value<T>;
    product.instruction = *static_cast<const Lane*>(given[0])->instruction;
    product.first_row = warp() % 4 * 16;
    float* registers[32];
    for (int i = 0; i < 32; ++i) {
      const Lane& other = *static_cast<const Lane*>(given[i]);
      const Instruction& its = *other.instruction;
      if (its.a != product.instruction.a || its.b != product.instruction.b)
        fail("%s: descriptors differ between lanes", its.what);
      if (its.accumulate != product.instruction.accumulate)
        fail("%s: scale-d differs between lanes", its.what);
      product.a[i] = other.a;
      registers[i] = other.c;
    }
    agreements[warp() / 4].check(warp(), product.instruction);
    own.issue(product, registers, kCount);
  });
}

}  // namespace emulator

namespace tessera {

inline void mbarrier_init(u32 barrier, u32 arrivals) {
  memcpy(emulator::shared_at(barrier, 8, 8, "mbarrier"), &emulator::kMark, 8);
  emulator::mbarriers[barrier] = {arrivals, arrivals};
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(u32 barrier) { emulator::arrive(barrier, 0); }
inline void mbarrier_arrive_expect(u32 barrier, u32 bytes) { emulator::arrive(barrier, bytes); }
inline void mbarrier_expect(u32 barrier, u32 bytes) {
  emulator::Mbarrier& at = emulator::mbarrier_at(barrier);
  if (at.missing == 0) emulator::fail("mbarrier %#x expects bytes behind all arrivals", barrier);
  at.bytes += bytes;
  emulator::maybe_switch();
}
inline void cp_async_arrive(u32 barrier) {
  emulator::copies.after([barrier] { emulator::count_arrival(barrier, 0); });
}
inline void mbarrier_wait(u32 barrier, u32 parity) {
  const emulator::Mbarrier& at = emulator::mbarrier_at(barrier);
  while ((at.phase & 1) == (parity & 1))
    emulator::wait_for(&at, "mbarrier at shared byte %#lx, parity %ld", barrier, parity);
}

inline void tma_load_4d(u32 target, const TensorMap* map, u32 barrier, int c0, int c1, int c2,
                        int c3) {
  emulator::loads.start(target, map, barrier, 4, {c0, c1, c2, c3, 0});
}
inline void tma_load_5d(u32 target, const TensorMap* map, u32 barrier, int row, int group,
                        int head) {
  emulator::loads.start(target, map, barrier, 5, {0, row, 0, group, head});
}

template <int kRegisters>
inline void registers_decrease() {}
template <int kRegisters>
inline void registers_increase() {}

inline void named_barrier_sync(int id, int threads) { emulator::bar_sync(id, threads); }
inline void named_barrier_arrive(int id, int threads) { emulator::bar_arrive(id, threads); }
inline void async_proxy_fence() {}
inline void nanosleep() {}

inline void wgmma_fence() {
  emulator::products[emulator::warp()].fence(emulator::lane());
  emulator::meet_lanes(~0u, "wgmma.fence", nullptr, [](const void* const*) {});
}
inline void wgmma_commit() {
  emulator::meet_lanes(~0u, "wgmma.commit_group", nullptr,
                       [](const void* const*) { emulator::products[emulator::warp()].commit(); });
}
template <int kPending>
inline void wgmma_wait() {
  emulator::meet_lanes(~0u, "wgmma.wait_group", nullptr, [](const void* const*) {
    emulator::products[emulator::warp()].wait(kPending);
  });
}

inline u32 descriptor_low(u32 address, u32 leading) {
  return ((address & 0x3FFFFu) >> 4) | ((leading >> 4) << 16);
}
inline u64 descriptor(u32 low, u32 stride) {
  return low | static_cast<u64>((stride >> 4) | (1u << 30)) << 32;
}

template <typename T, int kCount>
inline void wgmma_qk(T, float (&c)[kCount], u64 a, u64 b) {
  emulator::wgmma<T>(c, nullptr, {"wgmma_qk", a, b, false});
}
template <typename T, int kCount>
inline void wgmma_qk_add(T, float (&c)[kCount], u64 a, u64 b) {
  emulator::wgmma<T>(c, nullptr, {"wgmma_qk_add", a, b, true});
}
template <typename T, int kCount>
inline void wgmma_pv(T, float (&c)[kCount], const u32* a, u64 b, int accumulate) {
  emulator::wgmma<T>(c, a, {"wgmma_pv", 0, b, accumulate != 0});
}
template <typename T, int kCount>
inline void wgmma_pv_add(T, float (&c)[kCount], const u32* a, u64 b) {
  emulator::wgmma<T>(c, a, {"wgmma_pv_add", 0, b, true});
}

// A cluster is one CTA here, which nothing may be sent to.
inline u32 cluster_rank() { return 0; }
inline void cluster_sync() {}
inline void alone() { emulator::fail("CTAs run one after another: no other CTA of a cluster"); }
inline void tma_multicast_4d(u32, const TensorMap*, u32, u16, int, int, int, int) { alone(); }
inline void tma_multicast_5d(u32, const TensorMap*, u32, u16, int, int, int) { alone(); }
inline void mbarrier_arrive_remote(u32, u32) { alone(); }
inline void mbarrier_wait_cluster(u32, u32) { alone(); }

}  // namespace tessera
