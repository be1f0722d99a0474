// One multiprocessor of the emulated GPU: the threads of a CTA as fibers, what they wait for, and
// work that goes on by itself (copies, wgmma), which lands early, late or in between.
//
// A seed decides the order of everything that the hardware leaves open. Shared memory and stacks
// start as NaN, as does the target of a copy until it lands.
#pragma once

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <cstring>
#include <map>
#include <vector>

namespace emulator {

constexpr int kMaxThreads = 1024;
constexpr int kMaxWarps = kMaxThreads / 32;
constexpr size_t kStackBytes = 128 * 1024;
constexpr size_t kPage = 4096;
constexpr unsigned kMaxShared = 227 * 1024;

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;
};

struct Fiber {
  ucontext_t first;
  jmp_buf at;
  bool started;
  bool done;
  int number;
  Dim3 thread;
  const void* waits_for;  // null: ready
  const char* reason;     // a format for `detail`
  long detail[2];
};

// Work that goes on while its thread runs.
struct Background {
  virtual ~Background() = default;
  // Does one piece; false when there is none.
  virtual bool land(unsigned random) = 0;
};

struct Machine {
  Fiber fibers[kMaxThreads];
  Fiber host;
  Fiber* current = nullptr;
  int threads = 0;
  int alive = 0;
  Dim3 block, grid, block_size;
  unsigned shared_bytes = 0;
  std::uint8_t* shared = nullptr;
  char* stacks = nullptr;
  std::uint32_t ready[kMaxWarps];  // lanes that can go on
  int order[kMaxWarps];            // warps, the favoured first
  enum { kEarly, kLate, kAny } landing = kAny;
  bool favours = false;  // keeps to the favoured warp, or takes any
  std::uint64_t random_state = 1;
  std::vector<Background*> background;
  void (*body)(const void*) = nullptr;
  const void* params = nullptr;
  char error[8192];
  size_t error_length = 0;
};
inline Machine machine;

// What the stand-ins of PTX keep is cleared before a CTA, checked after it, and told in a deadlock.
inline std::vector<void (*)()> at_start;
inline std::vector<void (*)()> at_end;
inline std::vector<void (*)()> at_deadlock;

inline unsigned random_number() {  // xorshift64*
  std::uint64_t& x = machine.random_state;
  x ^= x >> 12;
  x ^= x << 25;
  x ^= x >> 27;
  return static_cast<unsigned>((x * 0x2545F4914F6CDD1Dull) >> 32);
}

inline int number() { return machine.current->number; }
inline int lane() { return number() % 32; }
inline int warp() { return number() / 32; }

[[noreturn]] inline void leave() { _longjmp(machine.host.at, 1); }

// Adds to the message of a launch that failed.
__attribute__((format(printf, 1, 0))) inline void say_list(const char* format, va_list values) {
  const size_t room = sizeof machine.error - machine.error_length;
  const int added = vsnprintf(machine.error + machine.error_length, room, format, values);
  machine.error_length += std::min<size_t>(added, room - 1);
}
__attribute__((format(printf, 1, 2))) inline void say(const char* format, ...) {
  va_list values;
  va_start(values, format);
  say_list(format, values);
  va_end(values);
}

inline void say_where() {
  say("block (%u, %u) thread %d: ", machine.block.x, machine.block.y, number());
}

// Ends the launch with a message.
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fail(const char* format, ...) {
  say_where();
  va_list values;
  va_start(values, format);
  say_list(format, values);
  va_end(values);
  leave();
}

inline bool land_something() {
  const unsigned count = machine.background.size();
  const unsigned first = random_number() % (count ? count : 1);
  for (unsigned i = 0; i < count; ++i)
    if (machine.background[(first + i) % count]->land(random_number())) return true;
  return false;
}

// Says what each thread waits for, lanes of a warp that wait for the same on one line.
[[noreturn]] inline void deadlock() {
  say("deadlock in block (%u, %u): every thread waits", machine.block.x, machine.block.y);
  for (int first = 0; first < machine.threads;) {
    const Fiber& fiber = machine.fibers[first];
    auto alike = [&fiber](const Fiber& other) {
      if (fiber.done || other.done) return fiber.done && other.done;
      return other.waits_for == fiber.waits_for &&
             !memcmp(other.detail, fiber.detail, sizeof fiber.detail);
    };
    int last = first;
    while ((last + 1) % 32 && last + 1 < machine.threads && alike(machine.fibers[last + 1])) ++last;
    say("\n  warp %d lanes %d to %d: ", first / 32, first % 32, last % 32);
    if (fiber.done) {
      say("ended");
    } else {
      say(fiber.reason, fiber.detail[0], fiber.detail[1]);
    }
    first = last + 1;
  }
  for (auto report : at_deadlock) report();
  leave();
}

inline Fiber* choose() {
  if (machine.landing == Machine::kAny && random_number() % 8 == 0) land_something();
  const int warps = (machine.threads + 31) / 32;
  if (!machine.favours || random_number() % 256 == 0) {
    const int one = random_number() % warps;
    const int other = random_number() % warps;
    std::swap(machine.order[one], machine.order[other]);
    std::swap(machine.order[0], machine.order[random_number() % warps]);
  }
  for (;;) {
    for (int i = 0; i < warps; ++i) {
      const int warp = machine.order[i];
      const std::uint32_t lanes = machine.ready[warp];
      if (!lanes) continue;
      const int turn = random_number() % 32;
      const std::uint32_t turned = lanes >> turn | (turn ? lanes << (32 - turn) : 0);
      return &machine.fibers[warp * 32 + (__builtin_ctz(turned) + turn) % 32];
    }
    if (!land_something()) deadlock();
  }
}

__attribute__((noinline)) inline void resume(Fiber* next) {
  Fiber* const self = machine.current;
  if (next == self) return;
  if (_setjmp(self->at)) return;
  machine.current = next;
  if (next->started) _longjmp(next->at, 1);
  next->started = true;
  setcontext(&next->first);
}

inline void unready(int thread) { machine.ready[thread / 32] &= ~(1u << thread % 32); }

// Waits until wake() is called for the object; the caller then looks whether it may go on.
// `reason` is a format for the two numbers, printed only when all threads wait.
__attribute__((noinline)) inline void wait_for(const void* object, const char* reason, long first,
                                               long second = 0) {
  Fiber& self = *machine.current;
  self.waits_for = object;
  self.reason = reason;
  self.detail[0] = first;
  self.detail[1] = second;
  unready(self.number);
  resume(choose());
}

inline void wake_range(const void* object, int first, int count) {
  for (int i = first; i < first + count && i < machine.threads; ++i) {
    Fiber& fiber = machine.fibers[i];
    if (fiber.waits_for != object || fiber.done) continue;
    fiber.waits_for = nullptr;
    machine.ready[i / 32] |= 1u << i % 32;
  }
}

inline void wake(const void* object) { wake_range(object, 0, machine.threads); }

// Another thread may go first.
inline void maybe_switch() {
  if (random_number() % 4 == 0) resume(choose());
}

inline void fiber_main() {
  machine.body(machine.params);
  Fiber& self = *machine.current;
  self.done = true;
  unready(self.number);
  if (--machine.alive == 0) leave();
  resume(choose());
  __builtin_unreachable();
}

// Where several threads meet: the last to come does the work for all.
struct Meeting {
  int arrived = 0;
  unsigned round = 0;
  const char* what = nullptr;
  const void* given[32];  // by lane
};
inline Meeting whole_warps[kMaxWarps];
inline std::map<std::uint64_t, Meeting> some_lanes;  // by warp and mask

// Lanes of a mask bring `mine`; the last one calls work(given).
template <typename Work>
inline void meet_lanes(std::uint32_t mask, const char* what, const void* mine, Work work) {
  if (!(mask >> lane() & 1)) fail("%s: the mask %#x lacks the lane itself", what, mask);
  Meeting& meeting =
      mask == ~0u ? whole_warps[warp()] : some_lanes[std::uint64_t(warp()) << 32 | mask];
  if (meeting.arrived && meeting.what != what)
    fail("%s, while others of the same threads are at %s", what, meeting.what);
  meeting.what = what;
  meeting.given[lane()] = mine;
  if (++meeting.arrived == __builtin_popcount(mask)) {
    work(meeting.given);
    meeting.arrived = 0;
    ++meeting.round;
    wake_range(&meeting, warp() * 32, 32);
    maybe_switch();
    return;
  }
  const unsigned round = meeting.round;
  while (meeting.round == round) wait_for(&meeting, what, 0);
}

// Barriers of bar.sync and bar.arrive, which count threads, also such as have ended and never come.
struct NamedBarrier {
  int arrived = 0;
  int expected = 0;
  unsigned round = 0;
};
inline NamedBarrier named_barriers[16];

inline void bar_arrive(int id, int count) {
  if (id < 0 || id > 15) fail("barrier %d: there are 16", id);
  if (count % 32 || count <= 0 || count > machine.threads)
    fail("barrier %d for %d threads of %d", id, count, machine.threads);
  NamedBarrier& barrier = named_barriers[id];
  if (barrier.arrived && barrier.expected != count)
    fail("barrier %d for %d threads, and for %d by others", id, count, barrier.expected);
  barrier.expected = count;
  if (++barrier.arrived == count) {
    barrier.arrived = 0;
    ++barrier.round;
    wake(&barrier);
  }
}

inline void bar_sync(int id, int count) {
  if (id < 0 || id > 15) fail("barrier %d: there are 16", id);
  NamedBarrier& barrier = named_barriers[id];
  const unsigned round = barrier.round;
  bar_arrive(id, count);
  while (barrier.round == round) wait_for(&barrier, "barrier %ld for %ld threads", id, count);
  maybe_switch();
}

// Shared memory by 32-bit address, checked.
inline std::uint8_t* shared_at(unsigned address, unsigned bytes, unsigned alignment,
                               const char* what) {
  if (address % alignment)
    fail("%s: shared address %#x is no multiple of %u", what, address, alignment);
  if (address > machine.shared_bytes || bytes > machine.shared_bytes - address)
    fail("%s: shared bytes %#x to %#x, the CTA has %#x", what, address, address + bytes,
         machine.shared_bytes);
  return machine.shared + address;
}

inline void on_fault(int, siginfo_t* info, void*) {
  say_where();
  say("access to address %p", info->si_addr);
  leave();
}

// Takes faults while a launch runs.
class FaultGuard {
 public:
  FaultGuard() {
    static char stack[64 * 1024];
    stack_t alternative{};
    alternative.ss_sp = stack;
    alternative.ss_size = sizeof stack;
    sigaltstack(&alternative, &old_stack_);
    struct sigaction action{};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGSEGV, &action, &old_segv_);
    sigaction(SIGBUS, &action, &old_bus_);
  }
  ~FaultGuard() {
    sigaction(SIGSEGV, &old_segv_, nullptr);
    sigaction(SIGBUS, &old_bus_, nullptr);
    sigaltstack(&old_stack_, nullptr);
  }

 private:
  stack_t old_stack_{};
  struct sigaction old_segv_, old_bus_;
};

inline void start_fibers() {
  if (!machine.stacks) {
    machine.stacks =
        static_cast<char*>(mmap(nullptr, kMaxThreads * kStackBytes, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    for (int i = 0; i < kMaxThreads; ++i)
      mprotect(machine.stacks + i * kStackBytes, kPage, PROT_NONE);
  }
  for (int i = 0; i < machine.threads; ++i) {
    Fiber& fiber = machine.fibers[i];
    fiber.started = fiber.done = false;
    fiber.number = i;
    fiber.thread = {unsigned(i), 0, 0};
    fiber.waits_for = nullptr;
    getcontext(&fiber.first);
    char* const stack = machine.stacks + i * kStackBytes + kPage;
    memset(stack + kStackBytes - kPage - 8192, 0xff, 8192);
    fiber.first.uc_stack.ss_sp = stack;
    fiber.first.uc_stack.ss_size = kStackBytes - kPage;
    fiber.first.uc_link = nullptr;
    makecontext(&fiber.first, fiber_main, 0);
  }
  for (int w = 0; w < kMaxWarps; ++w) {
    const int lanes = machine.threads - w * 32;
    machine.ready[w] = lanes >= 32 ? ~0u : lanes > 0 ? (1u << lanes) - 1 : 0;
    machine.order[w] = w;
  }
  machine.alive = machine.threads;
}

inline void run_block() {
  memset(machine.shared, 0xff, kMaxShared);
  for (NamedBarrier& barrier : named_barriers) barrier = {};
  for (Meeting& meeting : whole_warps) meeting = {};
  some_lanes.clear();
  for (auto clear : at_start) clear();
  start_fibers();
  machine.landing = static_cast<decltype(machine.landing)>(random_number() % 3);
  machine.favours = random_number() % 2;
  for (int i = (machine.threads + 31) / 32 - 1; i > 0; --i)
    std::swap(machine.order[i], machine.order[random_number() % (i + 1)]);
  machine.host.number = -1;
  machine.current = &machine.host;
  if (!_setjmp(machine.host.at)) {
    Fiber* const first = choose();
    machine.current = first;
    first->started = true;
    setcontext(&first->first);
  }
  if (machine.error_length) return;
  machine.current = &machine.host;
  if (!_setjmp(machine.host.at)) {
    for (unsigned i = machine.shared_bytes; i < kMaxShared; ++i)
      if (machine.shared[i] != 0xff)
        fail("wrote shared byte %#x, the CTA has %#x", i, machine.shared_bytes);
    for (auto check : at_end) check();
  }
}

// Runs a grid, one CTA after another. Returns null, or what was wrong.
inline const char* launch(void (*body)(const void*), const void* params, Dim3 grid,
                          unsigned threads, unsigned shared_bytes, std::uint8_t* shared,
                          std::uint64_t seed) {
  machine.error[0] = 0;
  machine.error_length = 0;
  machine.body = body;
  machine.params = params;
  machine.grid = grid;
  machine.block_size = {threads, 1, 1};
  machine.threads = threads;
  machine.shared = shared;
  machine.shared_bytes = shared_bytes;
  machine.random_state = seed * 0x9E3779B97F4A7C15ull + 1;
  if (threads == 0 || threads > kMaxThreads || threads % 32 || shared_bytes > kMaxShared)
    return "a launch that no GPU takes";
  FaultGuard guard;
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; ++x) {
      machine.block = {x, y, 0};
      run_block();
      if (machine.error_length) return machine.error;
    }
  }
  return nullptr;
}

}  // namespace emulator
