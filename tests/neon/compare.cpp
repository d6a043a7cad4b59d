// linear_int8 on Arm: every instruction set against the scalar one, bit for bit, and the integer sums against int64.
// Built by a cross compiler and run under an emulator (tests/test_neon.py). Prints the sets that it compared.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cpu/isa.h"
#include "cpu/linear_int8.h"

namespace {

uint64_t state = 1;
uint32_t number() { return static_cast<uint32_t>((state = state * 6364136223846793005u + 1442695040888963407u) >> 33); }
float normal() {
  float sum = 0;
  for (int i = 0; i < 4; ++i) sum += static_cast<float>(number() % 65536) / 32768.0f - 1.0f;
  return sum;
}

// Bytes whose last one lies before a page that may not be touched.
template <class T>
T* fenced(int64_t count) {
  const int64_t page = sysconf(_SC_PAGESIZE), bytes = count * static_cast<int64_t>(sizeof(T));
  const int64_t size = (bytes + page - 1) / page * page;
  char* base =
      static_cast<char*>(mmap(nullptr, size + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (base == MAP_FAILED || mprotect(base + size, page, PROT_NONE) != 0) std::abort();
  return reinterpret_cast<T*>(base + size - bytes);
}

struct Problem {
  int64_t n, k, group, rows;
  bool rotated, floats;
};

std::vector<float> product(const Problem& p, const sk::RowBlock& x, const sk::Int8Matrix& w, const char* isa) {
  if (!sk::set_isa(isa)) std::abort();
  float* out = fenced<float>(p.rows * p.n);
  sk::linear_int8(x, w, {nullptr, sk::Dtype::kF32}, {out, sk::Dtype::kF32, p.n}, 1);
  return std::vector<float>(out, out + p.rows * p.n);
}

bool check(const Problem& p, const std::vector<const char*>& sets) {
  const sk::Int8Shape shape{p.n, p.k, p.group, p.rotated};
  const sk::Int8Matrix w{shape, fenced<uint8_t>(shape.panels() * shape.panel_bytes()),
                         fenced<float>(shape.panels() * shape.groups() * sk::kPanelRows)};
  int8_t* codes = fenced<int8_t>(p.rows * p.k);
  float *values = fenced<float>(p.rows * p.k), *weights = fenced<float>(p.n * p.k);
  int8_t* w_codes = fenced<int8_t>(p.n * p.k);
  float *ones = fenced<float>(p.n), *x_ones = fenced<float>(p.rows);
  const uint32_t kind = number() % 3;  // anything, the largest products, one byte's extremes in turn
  const auto code = [&] {
    return static_cast<int8_t>(kind == 0 ? number() : kind == 1 ? -128 : number() % 2 ? 127 : -128);
  };
  for (int64_t i = 0; i < p.rows * p.k; ++i) codes[i] = code(), values[i] = normal();
  for (int64_t i = 0; i < p.n * p.k; ++i) w_codes[i] = code(), weights[i] = normal();
  for (int64_t i = 0; i < p.n; ++i) ones[i] = 1;
  for (int64_t i = 0; i < p.rows; ++i) x_ones[i] = 1;
  sk::RowBlock x{sk::RowType::kF32, values, p.rows, p.k, nullptr, 0, 0};
  if (!p.floats) x = {sk::RowType::kInt8, codes, p.rows, p.k, x_ones, 1, 1};
  if (p.floats)
    sk::pack_int8({sk::RowType::kF32, weights, p.n, p.k, nullptr, 0, 0}, 0, w, 1);
  else
    sk::pack_int8({sk::RowType::kInt8, w_codes, p.n, p.k, ones, 1, 1}, 0, w, 1);
  const std::vector<float> want = product(p, x, w, "scalar");
  if (!p.floats && p.group == p.k)
    for (int64_t r = 0; r < p.rows; ++r)
      for (int64_t c = 0; c < p.n; ++c) {
        int64_t sum = 0;
        for (int64_t i = 0; i < p.k; ++i) sum += static_cast<int64_t>(codes[r * p.k + i]) * w_codes[c * p.k + i];
        if (want[r * p.n + c] != static_cast<float>(sum)) return std::printf("scalar is not exact\n"), false;
      }
  for (const char* isa : sets) {
    const std::vector<float> got = product(p, x, w, isa);
    if (std::memcmp(got.data(), want.data(), want.size() * sizeof(float)) != 0)
      return std::printf("%s differs: n %lld k %lld group %lld rows %lld rotated %d floats %d\n", isa,
                         static_cast<long long>(p.n), static_cast<long long>(p.k), static_cast<long long>(p.group),
                         static_cast<long long>(p.rows), p.rotated, p.floats),
             false;
  }
  return true;
}

}  // namespace

int main() {
  std::vector<const char*> sets;
  for (const char* name : {"neon", "dotprod"})
    if (sk::set_isa(name)) sets.push_back(name);
  const int64_t shapes[][2] = {{1, 1},   {2, 2},    {3, 3},    {31, 31}, {32, 32},   {33, 33}, {64, 64},
                               {100, 5}, {128, 32}, {256, 64}, {60, 20}, {600, 200}, {96, 8},  {1400, 1400}};
  int64_t compared = 0;
  for (const auto& s : shapes)
    for (int64_t rows : {1, 2, 3, 4, 5, 6, 7, 9, 16})
      for (int64_t n : {1, 16, 17, 33})
        for (bool floats : {false, true}) {
          const bool power = (s[1] & (s[1] - 1)) == 0;
          for (bool rotated : {false, true})
            if (!rotated || (power && floats)) {
              if (!check({n, s[0], s[1], rows, rotated, floats}, sets)) return 1;
              ++compared;
            }
        }
  std::printf("%lld products:", static_cast<long long>(compared));
  for (const char* name : sets) std::printf(" %s", name);
  std::printf("\n");
  return 0;
}
