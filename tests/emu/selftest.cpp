// Kernels that are right, and kernels with one fault each: the emulator has to tell them apart.
#include <algorithm>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "sk/gpu/compat.h"
#include "sk/gpu/reduce.cuh"

namespace {

using sk::gpu::shuffle_xor;
using sk::gpu::wave;
constexpr int kThreads = 256;
using Block = sk::gpu::BlockTeam<kThreads>;
using Wave = sk::gpu::WaveTeam<kThreads>;

std::vector<int> numbers(int n) {
  std::vector<int> x(n);
  std::iota(x.begin(), x.end(), 1);
  return x;
}

// Every thread of every block must get the maximum, twice in a row from the same shared array.
bool block_reduction() {
  const std::vector<int> x = numbers(kThreads);
  std::vector<int> high(3 * kThreads, -1), low(3 * kThreads, -1);
  simt::launch(3, kThreads, [&] {
    const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
    high[i] = Block::reduce(x[threadIdx.x], sk::gpu::Max());
    low[i] = -Block::reduce(-x[threadIdx.x], sk::gpu::Max());
  });
  return std::count(high.begin(), high.end(), kThreads) == 3 * kThreads &&
         std::count(low.begin(), low.end(), 1) == 3 * kThreads;
}

bool wave_reduction() {
  const std::vector<int> x = numbers(kThreads);
  std::vector<int> y(kThreads, -1);
  simt::launch(1, kThreads, [&] { y[threadIdx.x] = Wave::reduce(x[threadIdx.x], sk::gpu::Max()); });
  for (int i = 0; i < kThreads; ++i)
    if (y[i] != (i / simt::config.wave + 1) * simt::config.wave) return false;
  return true;
}

// A x B for A [16, 32] and B [32, columns] of int8, started from D = (row - column), against a plain triple loop.
bool matrix_unit() {
  const bool wide = simt::config.wave == 64;
  const int columns = wide ? 16 : 8;
  std::mt19937 random(7);
  std::vector<int8_t> a(16 * 32), b(32 * columns);
  for (auto* matrix : {&a, &b})
    for (int8_t& v : *matrix) v = random() % 4 == 0 ? -128 : static_cast<int8_t>(random());
  const auto word = [](const std::vector<int8_t>& m, int first, int step) {  // four values of k
    uint32_t bits = 0;
    for (int i = 0; i < 4; ++i) bits |= static_cast<uint32_t>(static_cast<uint8_t>(m[first + i * step])) << 8 * i;
    return bits;
  };
  std::vector<int32_t> d(16 * columns, -1);
  simt::launch(1, 64, [&] {
    const int l = static_cast<int>(threadIdx.x) % wave(), r = wide ? l % 16 : l / 4, j = wide ? l / 16 : l % 4;
    const auto of_a = [&](int row, int k) { return word(a, row * 32 + 4 * k, 1); };
    const uint32_t of_b[2] = {word(b, 4 * j * columns + r, columns), word(b, 4 * (j + 4) * columns + r, columns)};
    const auto place = [&](int i) {
      return wide ? std::make_pair(4 * j + i, r) : std::make_pair(r + i / 2 * 8, 2 * j + i % 2);
    };
    int32_t sum[4];
    for (int i = 0; i < 4; ++i) sum[i] = place(i).first - place(i).second;
    if (wide) {
      const uint32_t two[2] = {of_a(r, j), of_a(r, j + 4)};
      sk::gpu::matrix_multiply(sum, two, of_b);
    } else {
      const uint32_t four[4] = {of_a(r, j), of_a(r + 8, j), of_a(r, j + 4), of_a(r + 8, j + 4)};
      sk::gpu::matrix_multiply(sum, four, of_b);
    }
    for (int i = 0; i < 4; ++i) d[place(i).first * columns + place(i).second] = sum[i];
  });
  for (int row = 0; row < 16; ++row)
    for (int column = 0; column < columns; ++column) {
      int32_t want = row - column;
      for (int k = 0; k < 32; ++k) want += a[row * 32 + k] * b[k * columns + column];
      if (d[row * columns + column] != want) return false;
    }
  return true;
}

bool other_matrix_unit() {  // the instruction of the other wave size
  simt::launch(1, 64, [&] {
    int32_t sum[4] = {};
    const uint32_t a[4] = {}, b[2] = {};
    if (wave() == 32)
      sk::gpu::matrix_multiply(sum, b, b);
    else
      sk::gpu::matrix_multiply(sum, a, b);
  });
  return true;
}

bool early_return() {  // half of the threads leave before the barrier
  std::vector<int> y(kThreads, -1);
  simt::launch(1, kThreads, [&] {
    const int i = static_cast<int>(threadIdx.x), n = kThreads / 2;
    if (i >= n) return;
    SK_SHARED(int, s, kThreads);
    s[i] = i;
    __syncthreads();
    y[i] = s[n - 1 - i];
  });
  for (int i = 0; i < kThreads / 2; ++i)
    if (y[i] != kThreads / 2 - 1 - i) return false;
  return true;
}

bool missing_barrier() {
  std::vector<int> y(kThreads, -1);
  simt::launch(1, kThreads, [&] {
    const int i = static_cast<int>(threadIdx.x);
    SK_SHARED(int, s, kThreads);
    s[i] = i;
    y[i] = s[(i + 1) % kThreads];
  });
  for (int i = 0; i < kThreads; ++i)
    if (y[i] != (i + 1) % kThreads) return false;
  return true;
}

bool thirty_two_lanes() {
  std::vector<int> y(64, 1);
  simt::launch(1, 64, [&] {
    int v = 1;
    for (int distance = 16; distance > 0; distance /= 2) v += shuffle_xor(v, distance);
    y[threadIdx.x] = v;
  });
  return y[0] == simt::config.wave;
}

bool read_before_write() {
  float sum = 0;
  simt::launch(1, 1, [&] {
    SK_SHARED(float, s, 4);
    for (int i = 0; i < 4; ++i) sum += s[i];
  });
  return sum == sum;
}

bool stale_shared() {  // what block 0 wrote must not be there for block 1
  bool found = false;
  simt::launch(2, 1, [&] {
    SK_SHARED(int, s, 1);
    if (blockIdx.x == 1) found = s[0] == 42;
    s[0] = 42;
  });
  return !found;
}

bool overrun() {
  simt::launch(1, 8, [&] {
    SK_SHARED(int, s, 8);
    s[threadIdx.x + 1] = 1;
  });
  return true;
}

bool split_barrier() {  // half of a wave at a barrier, the other half in an exchange
  simt::launch(1, 64, [&] {
    if (static_cast<int>(threadIdx.x) % wave() < 16)
      shuffle_xor(1, 1);
    else
      __syncthreads();
  });
  return true;
}

bool returned_lane() {
  simt::launch(1, 64, [&] {
    if (threadIdx.x % 32 >= 20) return;
    shuffle_xor(1, 1);
  });
  return true;
}

bool thrown() {
  simt::launch(2, 64, [&] {
    __syncthreads();
    if (blockIdx.x == 1 && threadIdx.x == 7) throw std::runtime_error("thread 7");
  });
  return true;
}

const std::vector<std::pair<std::string, bool (*)()>> kTests = {
    {"block_reduction", block_reduction},
    {"wave_reduction", wave_reduction},
    {"matrix_unit", matrix_unit},
    {"other_matrix_unit", other_matrix_unit},
    {"early_return", early_return},
    {"missing_barrier", missing_barrier},
    {"thirty_two_lanes", thirty_two_lanes},
    {"read_before_write", read_before_write},
    {"stale_shared", stale_shared},
    {"overrun", overrun},
    {"split_barrier", split_barrier},
    {"returned_lane", returned_lane},
    {"thrown", thrown},
};

}  // namespace

// "right", "wrong", or what the emulator reported.
extern "C" __attribute__((visibility("default"))) const char* simt_selftest(const char* name) {
  static std::string said;
  said = "no such test";
  for (const auto& [known, test] : kTests) {
    if (known != name) continue;
    try {
      said = test() ? "right" : "wrong";
    } catch (const std::exception& error) {
      said = error.what();
    }
  }
  return said.c_str();
}
