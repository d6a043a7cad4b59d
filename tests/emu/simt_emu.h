// Runs GPU kernels on one CPU thread: a test oracle for machines without a GPU.
//
// Every thread of a block is a fiber (ucontext). A fiber runs until it reaches a collective (a block barrier, or an
// exchange between the lanes of its wave) or returns. The LAST one to arrive at a collective does the work for all and
// makes them runnable, so there is no second phase in which a slot could be overwritten early. Threads that have
// returned count as arrived at a block barrier, as on hardware; in a wave exchange they are an error.
//
// What it finds: missing barriers (the run order is forward, reverse or random, and some order then gives a wrong
// result), code that assumes 32 lanes (the wave has 32 or 64), reads of shared memory before a write (it starts as
// 0xFF, which is NaN as a float), writes beyond a shared array, and hangs (reported with who waits where). What it
// can't find: anything about the memory model, races inside a wave, or bank conflicts. Blocks run one after another.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)

namespace simt {

enum class Order { kForward, kReverse, kRandom };
struct Config {
  int wave = 32;
  Order order = Order::kForward;
  unsigned seed = 0;
};
inline Config config;

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

// Where a collective stands in the source.
struct Where {
  const char* file = "";
  int line = 0;
  std::string text() const { return std::string(file) + ":" + std::to_string(line); }
  bool operator==(const Where& other) const { return line == other.line && !std::strcmp(file, other.file); }
};

enum class State { kRunnable, kAtBarrier, kInWave, kDone };
constexpr size_t kStack = 64 << 10;

struct Thread {
  Index index;
  State state = State::kDone;
  Where where{};
  void* operands = nullptr;  // of an operation of the whole wave: what this lane brings and gets
  ucontext_t start;  // of the fiber; from then on it is left and resumed by jumps, which ask the kernel for nothing
  jmp_buf place;
  bool started = false;
  std::unique_ptr<char[]> stack{new char[kStack]};
};

// One shared array: poisoned, with guard bytes behind it.
struct Shared {
  static constexpr size_t kGuard = 64;
  std::vector<unsigned char> bytes;
  explicit Shared(size_t size) : bytes(size + kGuard, 0xFF) {}
  bool overrun() const {
    return std::any_of(bytes.end() - kGuard, bytes.end(), [](unsigned char b) { return b != 0xFF; });
  }
};

struct Block {
  Index index, size, grid;
  std::vector<Thread>* threads = nullptr;
  std::vector<unsigned> exchanging;  // lanes that wait for an exchange, per wave
  unsigned alive = 0, arrived = 0;
  std::map<const void*, Shared> shared;
  const std::function<void()>* body = nullptr;
  std::exception_ptr error;
  bool released = false;  // a collective has just been completed
  jmp_buf scheduler;
};
inline thread_local Block* block = nullptr;
inline thread_local Thread* self = nullptr;

inline unsigned number(const Thread& t) { return static_cast<unsigned>(&t - block->threads->data()); }
inline int lane() { return static_cast<int>(number(*self)) % config.wave; }

// Lets a fiber run until it waits or is done.
inline void resume(Thread* thread) {
  if (_setjmp(block->scheduler) != 0) return;
  self = thread;
  if (thread->started) _longjmp(thread->place, 1);
  thread->started = true;
  setcontext(&thread->start);
}

inline void wait(State state, Where where) {
  Thread* me = self;
  me->state = state;
  me->where = where;
  if (_setjmp(me->place) == 0) _longjmp(block->scheduler, 1);
}

inline void open_barrier_if_all_arrived() {
  if (block->arrived == 0 || block->arrived < block->alive) return;
  block->arrived = 0;
  block->released = true;
  for (Thread& t : *block->threads)
    if (t.state == State::kAtBarrier) t.state = State::kRunnable;
}

inline void barrier(Where where) {
  Thread* me = self;
  me->state = State::kAtBarrier;
  me->where = where;
  ++block->arrived;
  open_barrier_if_all_arrived();
  if (me->state == State::kAtBarrier) wait(State::kAtBarrier, where);
}

// An operation of the whole wave: each lane brings its operands, which live on its stack while it waits. The last one
// to arrive checks that all are at the same place and runs serve(the lanes' operands, how many lanes).
template <class Operands, class Serve>
void together(Operands& mine, Where where, const Serve& serve) {
  Thread* me = self;
  me->operands = &mine;
  me->state = State::kInWave;
  me->where = where;
  Thread* first = me - lane();
  unsigned& exchanging = block->exchanging[number(*first) / config.wave];
  const int lanes =
      std::min<int>(config.wave, static_cast<int>(block->threads->data() + block->threads->size() - first));
  if (exchanging++ == 0)
    for (Thread* t = first; t < first + lanes; ++t)
      if (t->state == State::kDone) throw std::logic_error(where.text() + ": a lane of the wave has returned");
  if (exchanging < static_cast<unsigned>(lanes)) {
    wait(State::kInWave, where);
    return;
  }
  exchanging = 0;
  std::vector<Operands*> all;
  for (Thread* t = first; t < first + lanes; ++t) {
    if (!(t->where == where))
      throw std::logic_error(where.text() + ": another lane is in a different exchange, in " + t->where.text());
    all.push_back(static_cast<Operands*>(t->operands));
  }
  serve(all, lanes);
  for (Thread* t = first; t < first + lanes; ++t) t->state = State::kRunnable;
  block->released = true;
}

// The value of lane `source` comes back.
inline uint64_t exchange(uint64_t given, int source, Where where) {
  struct Operands {
    uint64_t given, got;
    int source;
  } mine{given, 0, source};
  together(mine, where, [&](const std::vector<Operands*>& all, int lanes) {
    for (Operands* lane : all) {
      if (lane->source < 0 || lane->source >= lanes) throw std::logic_error(where.text() + ": no such lane");
      lane->got = all[lane->source]->given;
    }
  });
  return mine.got;
}

template <class T>
T shuffle_xor(T value, int distance, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = exchange(bits, lane() ^ distance, Where{file, line});
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline bool any_in_wave(bool value, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  for (int distance = config.wave / 2; distance > 0; distance /= 2)
    value = shuffle_xor(value, distance, file, line) || value;
  return value;
}

// Four signed bytes times four, added to c modulo 2^32.
inline int32_t dot4(uint32_t a, uint32_t b, int32_t c) {
  uint32_t sum = static_cast<uint32_t>(c);
  for (int shift = 0; shift < 4 * 8; shift += 8)
    sum += static_cast<uint32_t>(static_cast<int8_t>(a >> shift) * static_cast<int8_t>(b >> shift));
  return static_cast<int32_t>(sum);
}

// D = A B + D by the matrix unit of a wave, A [16, 8 words], B [8 words, columns], words of four signed bytes along k.
// Where each element lives is what the vendors' manuals say: NVIDIA's mma.m16n8k32 on 32 lanes (8 columns; a: rows r
// and r + 8, words j and j + 4), AMD's mfma of 16x16x16 twice on 64 (16 columns; a: row r, one word of each).
template <int kWave, int kWords>
void matrix_multiply(int32_t (&d)[4], const uint32_t (&a)[kWords], const uint32_t (&b)[2],
                     const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  struct Operands {
    const uint32_t *a, *b;
    int32_t* d;
  } mine{a, b, d};
  if (config.wave != kWave) throw std::logic_error("a matrix instruction of the other wave size");
  together(mine, Where{file, line}, [](const std::vector<Operands*>& all, int lanes) {
    if (lanes != kWave) throw std::logic_error("a matrix instruction in a wave that is not full");
    constexpr bool kNvidia = kWave == 32;
    for (int l = 0; l < kWave; ++l)
      for (int i = 0; i < 4; ++i) {
        const int row = kNvidia ? l / 4 + 8 * (i / 2) : 4 * (l / 16) + i;
        const int column = kNvidia ? 2 * (l % 4) + i % 2 : l % 16;
        for (int j = 0; j < 4; ++j)
          for (int half = 0; half < 2; ++half) {
            const Operands& of_a = *all[kNvidia ? row % 8 * 4 + j : 16 * j + row];
            const Operands& of_b = *all[kNvidia ? column * 4 + j : 16 * j + column];
            int32_t& sum = all[l]->d[i];
            sum = dot4(of_a.a[kNvidia ? row / 8 + 2 * half : half], of_b.b[half], sum);
          }
      }
  });
}

template <class T>
T* shared(const void* site, size_t count) {
  const auto found = block->shared.try_emplace(site, count * sizeof(T)).first;
  return reinterpret_cast<T*>(found->second.bytes.data());
}

inline void enter() {
  try {
    (*block->body)();
  } catch (...) {  // must not leave the fiber's stack
    block->error = std::current_exception();
  }
  self->state = State::kDone;
  if (!block->error && block->exchanging[number(*self) / config.wave] > 0)
    block->error = std::make_exception_ptr(std::logic_error("a lane of the wave has returned before an exchange"));
  --block->alive;
  open_barrier_if_all_arrived();
  _longjmp(block->scheduler, 1);
}

inline std::string who_waits() {
  std::map<std::string, std::vector<unsigned>> places;
  for (const Thread& t : *block->threads) {
    if (t.state == State::kDone) continue;
    places[(t.state == State::kAtBarrier ? "at the barrier in " : "for the wave in ") + t.where.text()].push_back(
        number(t));
  }
  std::string text = "hang: no thread of block " + std::to_string(block->index.x) + " can run";
  for (const auto& [place, who] : places)
    text +=
        "\n  " + std::to_string(who.size()) + " threads, thread " + std::to_string(who[0]) + " first, wait " + place;
  return text;
}

inline void run_block(std::vector<unsigned>& order, std::mt19937& random) {
  for (Thread& t : *block->threads) {
    t.state = State::kRunnable;
    t.started = false;
    getcontext(&t.start);
    t.start.uc_stack = {t.stack.get(), 0, kStack};
    t.start.uc_link = nullptr;
    makecontext(&t.start, enter, 0);
  }
  // After each completed collective the search starts again at the front, so that the first waves run as far ahead of
  // the others as the barriers let them.
  while (block->alive > 0) {
    if (config.order == Order::kRandom) std::shuffle(order.begin(), order.end(), random);
    bool ran = false;
    block->released = false;
    for (unsigned i : order) {
      Thread* next = &(*block->threads)[i];
      if (next->state != State::kRunnable) continue;
      resume(next);
      ran = true;
      if (block->error) std::rethrow_exception(block->error);
      if (block->released) break;
    }
    if (!ran) throw std::logic_error(who_waits());
  }
  for (const auto& array : block->shared)
    if (array.second.overrun()) throw std::logic_error("a write beyond a shared array");
}

inline void launch(unsigned blocks, unsigned threads, const std::function<void()>& body) {
  std::vector<Thread> fibers(threads);
  std::vector<unsigned> order(threads);
  for (unsigned i = 0; i < threads; ++i) {
    fibers[i].index.x = i;
    order[i] = config.order == Order::kReverse ? threads - 1 - i : i;
  }
  std::mt19937 random(config.seed);
  for (unsigned b = 0; b < blocks; ++b) {
    Block state;
    state.index.x = b;
    state.size = {threads, 1, 1};
    state.grid = {blocks, 1, 1};
    state.threads = &fibers;
    state.exchanging.assign(threads / config.wave + 1, 0);
    state.alive = threads;
    state.body = &body;
    block = &state;
    run_block(order, random);
  }
  block = nullptr;
  self = nullptr;
}

}  // namespace simt

#define threadIdx (simt::self->index)
#define blockIdx (simt::block->index)
#define blockDim (simt::block->size)
#define gridDim (simt::block->grid)
#define __syncthreads() simt::barrier(simt::Where{__FILE__, __LINE__})
