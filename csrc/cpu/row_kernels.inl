// Hot loops over a row of logits; row_kernels.cpp includes this once per instruction set, inside a namespace that has
// defined the vector type Floats of kBytes bytes and a few operations on it. The other vectors are GCC's own. Every sum
// has a fixed order. Rows are read from front to back without prefetching: the processor's own is faster (f32: 33 GB/s
// against 21 on one Zen 4 core).

typedef int32_t Ints __attribute__((vector_size(kBytes)));
typedef uint32_t Words __attribute__((vector_size(kBytes)));
typedef double Doubles __attribute__((vector_size(kBytes)));
typedef int64_t Integers __attribute__((vector_size(kBytes)));
typedef float HalfFloats __attribute__((vector_size(kBytes / 2)));
constexpr int kFloats = kBytes / 4, kDoubles = kBytes / 8;

template <class T>
bool max_blocks(const void* row, int64_t blocks, int64_t block, float* out) {
  const T* x = static_cast<const T*>(row);
  const Floats lowest = Floats{} - INFINITY;
  Mask nan{};
  for (int64_t b = 0; b < blocks; ++b) {
    Floats top[4] = {lowest, lowest, lowest, lowest};
    for (const T* stop = x + block; x != stop; x += kGroup) {
#pragma GCC unroll 4
      for (int i = 0; i < kGroup; i += 4 * kFloats) {
        const Floats v[4] = {load(x + i), load(x + i + kFloats), load(x + i + 2 * kFloats), load(x + i + 3 * kFloats)};
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) top[j] = larger(v[j], top[j]);  // a NaN never gets in
        nan |= unordered(v[0], v[1]) | unordered(v[2], v[3]);
      }
    }
    out[b] = largest(larger(larger(top[0], top[1]), larger(top[2], top[3])));
  }
  return any(nan);
}

// bf16, two entries per 32 bits: the upper one is compared with the lower one as digits behind its own, which decide
// only between equals and are cut off at the end. That makes NaN of infinities, so blocks with either are done again.
bool max_pairs(const void* row, int64_t blocks, int64_t block, float* out) {
  const float* x = static_cast<const float*>(row);
  const Floats lowest = Floats{} - INFINITY;
  bool nan = false;
  for (int64_t b = 0; b < blocks; ++b) {
    const float* const start = x;
    Mask suspicious{};
    Floats upper[2] = {lowest, lowest}, lower[2] = {lowest, lowest};
    for (const float* stop = x + block / 2; x != stop; x += kGroup / 2) {
#pragma GCC unroll 4
      for (int i = 0; i < kGroup / 2; i += 2 * kFloats)
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {
          const Floats high = load(x + i + kFloats * j);
          Words bits;
          memcpy(&bits, &high, sizeof bits);
          bits <<= 16;
          Floats low;
          memcpy(&low, &bits, sizeof low);
          upper[j] = larger(high, upper[j]);
          lower[j] = larger(low, lower[j]);
          suspicious |= unordered(high, low);
        }
    }
    if (any(suspicious)) {
      nan |= max_blocks<BF16>(start, 1, block, out + b);
      continue;
    }
    Words bits;
    const Floats high = larger(upper[0], upper[1]);
    memcpy(&bits, &high, sizeof bits);
    bits &= 0xffff0000u;
    Floats cut;
    memcpy(&cut, &bits, sizeof cut);
    out[b] = largest(larger(cut, larger(lower[0], lower[1])));
  }
  return nan;
}

template <class T>
int64_t find(const void* row, int64_t n, float value) {
  const T* x = static_cast<const T*>(row);
  const Floats wanted = Floats{} + value;
  int64_t i = 0;
  for (; i + kFloats <= n; i += kFloats)
    if (any(equal(load(x + i), wanted))) break;
  while (i < n && to_f32(x[i]) != value) ++i;
  return i;
}

// The entries in [least, most] of the groups whose largest one is not below; -1 if there are more than room - 64.
template <class T>
int64_t collect(const void* row, int64_t groups, const float* top, float least, float most, int64_t room, float* out) {
  const T* x = static_cast<const T*>(row);
  const Floats low = Floats{} + least, high = Floats{} + most;
  int64_t n = 0;
  const auto take = [&](int64_t g) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int i = 0; i < kGroup; i += kFloats) {
      const Floats v = load(x + g * kGroup + i);
      n += pack(v, within(v, low, high), out + n);
    }
  };
  int64_t g = 0;
  for (; g + kFloats <= groups; g += kFloats)
    for (unsigned todo = bits(within(load(top + g), low, Floats{} + INFINITY)); todo != 0; todo &= todo - 1) {
      if (n > room - kGroup) return -1;
      take(g + __builtin_ctz(todo));
    }
  for (; g < groups; ++g) {
    if (top[g] < least) continue;
    if (n > room - kGroup) return -1;
    take(g);
  }
  return n;
}

template <class T>
void load64(const void* group, float* out) {
  for (int i = 0; i < kGroup; i += kFloats) {
    Floats v = load(static_cast<const T*>(group) + i);
    v = v == v ? v : Floats{} - INFINITY;
    memcpy(out + i, &v, sizeof v);
  }
}

int64_t count_from(const float* x, int64_t n, float least) {
  Ints count{};
  int64_t i = 0;
  for (; i + kFloats <= n; i += kFloats) {
    Floats v;
    memcpy(&v, x + i, sizeof v);
    count -= v >= least;
  }
  int64_t sum = 0;
  for (int j = 0; j < kFloats; ++j) sum += count[j];
  for (; i < n; ++i) sum += x[i] >= least;
  return sum;
}

// Bit patterns of numbers that are finite and >= 0: up to `largest`, and -0.
template <class Bits, int kCount>
bool all_up_to(const void* row, int64_t n, Bits largest) {
  typedef Bits Vector __attribute__((vector_size(kBytes)));
  const Bits minus_zero = static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1));
  const Bits* x = static_cast<const Bits*>(row);
  Vector bad{};
  int64_t i = 0;
  for (; i + 4 * kCount <= n; i += 4 * kCount) {
    for (int j = 0; j < 4; ++j) {
      Vector v;
      memcpy(&v, x + i + kCount * j, sizeof v);
      bad |= (v > largest) & (v != minus_zero);
    }
  }
  Bits any = 0;
  for (int j = 0; j < kCount; ++j) any |= bad[j];
  for (; i < n; ++i) any |= static_cast<Bits>(x[i] > largest && x[i] != minus_zero);
  return any == 0;
}

template <class T>
bool all_probabilities(const void* row, int64_t n);
template <>
bool all_probabilities<float>(const void* row, int64_t n) {
  return all_up_to<uint32_t, kBytes / 4>(row, n, 0x7f7fffff);
}
template <>
bool all_probabilities<F16>(const void* row, int64_t n) {
  return all_up_to<uint16_t, kBytes / 2>(row, n, 0x7bff);
}
template <>
bool all_probabilities<BF16>(const void* row, int64_t n) {
  return all_up_to<uint16_t, kBytes / 2>(row, n, 0x7f7f);
}

void first_words(uint64_t seed, uint64_t position, uint32_t c2, uint32_t first, uint32_t* out) {
  constexpr int kParts = 16 / kDoubles;
  Longs a[kParts], b[kParts], c[kParts], d[kParts];  // 32-bit words in 64-bit lanes
  for (int j = 0; j < kParts; ++j) {
    a[j] = Longs{} + (position & 0xffffffffu);
    b[j] = Longs{} + (position >> 32);
    c[j] = Longs{} + c2;
    for (int k = 0; k < kDoubles; ++k) d[j][k] = first + static_cast<uint32_t>(kDoubles * j + k);
  }
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
    for (int j = 0; j < kParts; ++j) {
      const Longs p0 = product(a[j], 0xD2511F53u), p1 = product(c[j], 0xCD9E8D57u);
      a[j] = (p1 >> 32) ^ b[j] ^ k0;
      c[j] = (p0 >> 32) ^ d[j] ^ k1;
      b[j] = p1 & 0xffffffffu;
      d[j] = p0 & 0xffffffffu;
    }
  for (int j = 0; j < 16; ++j) out[j] = static_cast<uint32_t>(a[j / kDoubles][j % kDoubles]);
}
