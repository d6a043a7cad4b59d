// Weights of logits and their sums; row_kernels.cpp includes this after row_kernels.inl.

// 2^t for t = max(d, low) * scale <= 0: with n an integer near t, 2^(t - n) from a polynomial of degree 5 (minimax,
// 9e-8; 2^0 is 1), times 2^n.
inline Floats weights_of(Floats d, const FloatWeights& w) {
  const Floats zero{};
  d = larger(d, zero + w.low);  // also for NaN
#if SK_ROW_SCALE
  const Floats t = d * w.scale, f = above_floor(t);
  Floats p = fused(f, zero + 1.8689563731e-3f, zero + 9.0148849413e-3f);
  p = fused(p, f, zero + 5.5799301714e-2f);
  p = fused(p, f, zero + 2.4016565084e-1f);
  p = fused(p, f, zero + 6.9315105677e-1f);
  p = fused(p, f, zero + 1.0f);
  return scaled(p, t);
#else
  const Floats scale = zero + w.scale, magic = zero + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Floats shifted = fused(d, scale, magic);
  const Floats f = fused(d, scale, magic - shifted);
  Floats p = fused(f, zero + 1.3264649315e-3f, zero + 9.6715763211e-3f);
  p = fused(p, f, zero + 5.5507343262e-2f);
  p = fused(p, f, zero + 2.4022240936e-1f);
  p = fused(p, f, zero + 6.9314700365e-1f);
  p = fused(p, f, zero + 1.0f);
  Words exponent, bits;
  memcpy(&exponent, &shifted, sizeof exponent);
  memcpy(&bits, &p, sizeof bits);
  bits += exponent << 23;
  memcpy(&p, &bits, sizeof p);
  return p;
#endif
}

// NaN and -inf weigh 2^-126 here, which is nothing beside the least mass that is evaluated.
template <class T>
void masses(const void* row, int64_t groups, const FloatWeights& weights, double least, double* mass) {
  constexpr int kSums = 16 / kFloats;
  const auto evaluate = [&](int64_t g) __attribute__((always_inline)) {
    const T* x = static_cast<const T*>(row) + g * kGroup;
    Floats sums[kSums] = {};
#pragma GCC unroll 4
    for (int i = 0; i < kGroup; i += 16)
#pragma GCC unroll 4
      for (int j = 0; j < kSums; ++j) sums[j] += weights_of(load(x + i + kFloats * j) - weights.max, weights);
    mass[g] = sum(fold16(sums));
  };
  int64_t g = 0;
  for (; g + 8 <= groups; g += 8)
    for (unsigned todo = below8(mass + g, -least); todo != 0; todo &= todo - 1) evaluate(g + __builtin_ctz(todo));
  for (; g < groups; ++g)
    if (mass[g] < -least) evaluate(g);
}

// Sums over many groups stay in float for 16 of them at a time.
template <class T>
void sums_from(const void* row, int64_t groups, const float* top, const FloatWeights& weights, const float* least,
               double* out) {
  const T* x = static_cast<const T*>(row);
  for (int64_t g = 0; g < groups;) {
    Floats sums[kThresholds] = {};
    for (const int64_t stop = g + 16 < groups ? g + 16 : groups; g < stop; ++g) {
      if (top[g] < least[0]) continue;
      for (int i = 0; i < kGroup; i += kFloats) {
        const Floats v = load(x + g * kGroup + i), w = weights_of(v - weights.max, weights);
#pragma GCC unroll 8
        for (int j = 0; j < kThresholds; ++j) sums[j] += where_from(v, Floats{} + least[j], w);
      }
    }
    for (int j = 0; j < kThresholds; ++j) out[j] += sum(sums[j]);
  }
}

void limit(const float* top, int64_t groups, float least, double* mass) {
  for (int64_t g = 0; g < groups; ++g) {
    const double most = mass[g] > 0 ? -1.00001 * mass[g] : mass[g];
    mass[g] = top[g] >= least ? most : 0.0;
  }
}

void bounds(const float* top, int64_t groups, const FloatWeights& weights, float cut, double* out) {
  for (int64_t g = 0; g < groups; g += kFloats) {
    const int64_t n = groups - g < kFloats ? groups - g : kFloats;
    Floats v = Floats{} - INFINITY;
    if (n == kFloats) {
      v = load(top + g);
    } else {
      memcpy(&v, top + g, n * sizeof(float));
    }
    Floats w = weights_of(v - weights.max, weights) * -(kGroup * 1.0001f);
    w = v >= cut ? w : Floats{};
    double wide[kFloats];
    HalfFloats half[2];
    memcpy(half, &w, sizeof half);
    for (int i = 0; i < 2; ++i) {
      const Doubles part = __builtin_convertvector(half[i], Doubles);
      memcpy(wide + kDoubles * i, &part, sizeof part);
    }
    memcpy(out + g, wide, n * sizeof(double));
  }
}

void tally(const double* x, int64_t n, double* positive, double* negative) {
  constexpr int kSums = 8 / kDoubles;
  Doubles above[kSums] = {}, below[kSums] = {};
  int64_t i = 0;
  const auto add = [&](const double* at) __attribute__((always_inline)) {
    for (int j = 0; j < kSums; ++j) {
      Doubles v;
      memcpy(&v, at + kDoubles * j, sizeof v);
      above[j] += v > 0.0 ? v : Doubles{};
      below[j] += v > 0.0 ? Doubles{} : v;
    }
  };
  for (; i + 8 <= n; i += 8) add(x + i);
  double rest[8] = {};
  memcpy(rest, x + i, (n - i) * sizeof(double));
  add(rest);
  double a[8], b[8];
  memcpy(a, above, sizeof a);
  memcpy(b, below, sizeof b);
  *positive = ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
  *negative = ((b[0] + b[4]) + (b[2] + b[6])) + ((b[1] + b[5]) + (b[3] + b[7]));
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
