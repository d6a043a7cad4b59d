// Hot loops over a row of logits; row_kernels.cpp includes this once per instruction set, inside a namespace that has
// defined kBytes (the width of its vectors) and convert_f16. Vectors are GCC's own. Every sum has a fixed order and
// nothing is contracted: all instruction sets give the same bits.

typedef float Floats __attribute__((vector_size(kBytes)));
typedef int32_t Ints __attribute__((vector_size(kBytes)));
typedef uint32_t Words __attribute__((vector_size(kBytes)));
typedef uint16_t Halves __attribute__((vector_size(kBytes / 2)));
typedef double Doubles __attribute__((vector_size(kBytes)));
typedef uint64_t Longs __attribute__((vector_size(kBytes)));
typedef float HalfFloats __attribute__((vector_size(kBytes / 2)));
constexpr int kFloats = kBytes / 4, kDoubles = kBytes / 8;

inline void load(const float* x, Floats& out) { memcpy(&out, x, sizeof out); }
inline void load(const BF16* x, Floats& out) {
  Halves half;
  memcpy(&half, x, sizeof half);
  const Words bits = __builtin_convertvector(half, Words) << 16;
  memcpy(&out, &bits, sizeof out);
}
inline void load(const F16* x, Floats& out) { convert_f16(x, reinterpret_cast<float*>(&out)); }

template <class T>
bool max_blocks(const void* row, int64_t blocks, int64_t block, float* out) {
  const T* x = static_cast<const T*>(row);
  const Floats lowest = Floats{} - INFINITY;
  Ints nan = {};
  for (int64_t b = 0; b < blocks; ++b, x += block) {
    Floats top[4] = {lowest, lowest, lowest, lowest};
    for (int64_t i = 0; i < block; i += 4 * kFloats)
      for (int j = 0; j < 4; ++j) {
        Floats v;
        load(x + i + kFloats * j, v);
        top[j] = v > top[j] ? v : top[j];  // a NaN never gets in
        nan |= v != v;
      }
    top[0] = top[0] > top[1] ? top[0] : top[1];
    top[2] = top[2] > top[3] ? top[2] : top[3];
    top[0] = top[0] > top[2] ? top[0] : top[2];
    float best = top[0][0];
    for (int j = 1; j < kFloats; ++j) best = top[0][j] > best ? top[0][j] : best;
    out[b] = best;
  }
  int32_t any = 0;
  for (int j = 0; j < kFloats; ++j) any |= nan[j];
  return any != 0;
}

template <class T>
void load64(const void* group, float* out) {
  for (int i = 0; i < kGroup; i += kFloats) {
    Floats v;
    load(static_cast<const T*>(group) + i, v);
    v = v == v ? v : Floats{} - INFINITY;
    memcpy(out + i, &v, sizeof v);
  }
}

// exp(x) for x <= 0 to 2e-7, in the way of exp64.h with the coefficients of Cephes expf; exp(-87) for all below.
inline void exp_floats(Floats& x) {
  x = x > -87.0f ? x : Floats{} - 87.0f;
  const Floats shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23
  const Floats n = shifted - 12582912.0f;
  const Floats r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * r) * r + (r + 1.0f);
  Words exponent, bits;
  memcpy(&exponent, &shifted, sizeof exponent);
  memcpy(&bits, &p, sizeof bits);
  bits += exponent << 23;
  memcpy(&x, &bits, sizeof x);
}

template <class T>
void masses(const void* row, int64_t groups, const float* top, const MassParameters& m, double* out) {
  constexpr int kSums = 16 / kFloats;
  const T* x = static_cast<const T*>(row);
  for (int64_t g = 0; g < groups; ++g, x += kGroup) {
    if (top[g] < m.cut || top[g] < m.negligible) {
      out[g] = top[g] < m.cut ? 0.0 : -1.0;
      continue;
    }
    Floats sum[kSums] = {};
    for (int i = 0; i < kGroup; i += 16)
      for (int j = 0; j < kSums; ++j) {
        Floats v;
        load(x + i + kFloats * j, v);
        Floats e = (v - m.max) * m.inv_t;
        exp_floats(e);
        sum[j] += v >= m.cut ? e : Floats{};  // a NaN is not
      }
    float lane[16];
    memcpy(lane, sum, sizeof lane);
    double pair[8];
    for (int j = 0; j < 8; ++j) pair[j] = static_cast<double>(lane[j]) + lane[j + 8];
    out[g] = ((pair[0] + pair[4]) + (pair[2] + pair[6])) + ((pair[1] + pair[5]) + (pair[3] + pair[7]));
  }
}

double exp64(const float* l, double max, double inv_t, float cut, double least, double* w) {
  constexpr int kSums = 8 / kDoubles;
  Doubles sum[kSums] = {};
  for (int i = 0; i < kGroup; i += 8)
    for (int j = 0; j < kSums; ++j) {
      HalfFloats logit;
      memcpy(&logit, l + i + kDoubles * j, sizeof logit);
      const Doubles wide = __builtin_convertvector(logit, Doubles);
      Doubles e = (wide - max) * inv_t;
      exp_in_place<Doubles, Longs>(e);
      e = wide >= static_cast<double>(cut) ? e : Doubles{};
      e = e >= least ? e : Doubles{};
      memcpy(w + i + kDoubles * j, &e, sizeof e);
      sum[j] += e;
    }
  double lane[8];
  memcpy(lane, sum, sizeof lane);
  return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
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
      const Longs p0 = a[j] * 0xD2511F53u, p1 = c[j] * 0xCD9E8D57u;
      a[j] = (p1 >> 32) ^ b[j] ^ k0;
      c[j] = (p0 >> 32) ^ d[j] ^ k1;
      b[j] = p1 & 0xffffffffu;
      d[j] = p0 & 0xffffffffu;
    }
  for (int j = 0; j < 16; ++j) out[j] = static_cast<uint32_t>(a[j / kDoubles][j % kDoubles]);
}
