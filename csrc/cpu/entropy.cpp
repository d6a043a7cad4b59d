// sum p log(p + 1e-5) = log(1e-5) + sum p log(1 + 1e5 p), evaluated group by group.
#include "cpu/entropy.h"

#include <cmath>
#include <cstring>

#include "cpu/isa.h"
#include "cpu/log64.h"
#include "sk/accept.h"

namespace sk {
namespace {

constexpr double kFloor = 1e-5;
constexpr double kNothing = 1e-12;  // a group of less adds less than 1e5 of its square

// w = p log(1 + p / kFloor), p = w * per_weight, of 64 weights.
template <class D, class U>
__attribute__((always_inline)) inline void terms(double per_weight, double* w) {
  constexpr int kWidth = sizeof(D) / sizeof(double);
  for (int i = 0; i < kGroup; i += kWidth) {
    D p;
    memcpy(&p, w + i, sizeof p);
    p = p * per_weight;
    D z = p * (1.0 / kFloor) + 1.0;
    log_in_place<D, U>(z);
    p = p * z;
    memcpy(w + i, &p, sizeof p);
  }
}

template <int kBytes>
struct Vector {
  typedef double D __attribute__((vector_size(kBytes)));
  typedef uint64_t U __attribute__((vector_size(kBytes)));
};

void terms_scalar(double per_weight, double* w) { terms<double, uint64_t>(per_weight, w); }
#if SK_X86
SK_TARGET_AVX2_BEGIN
void terms_avx2(double per_weight, double* w) { terms<Vector<32>::D, Vector<32>::U>(per_weight, w); }
SK_TARGET_END
SK_TARGET_AVX512_BEGIN
void terms_avx512(double per_weight, double* w) { terms<Vector<64>::D, Vector<64>::U>(per_weight, w); }
SK_TARGET_END
constexpr void (*kTerms[])(double, double*) = {terms_scalar, terms_avx2, terms_avx512};
#else
constexpr void (*kTerms[])(double, double*) = {terms_scalar};
#endif

}  // namespace

double negative_entropy(Row& row) {
  const double per_weight = 1.0 / row.total();
  double sum = std::log(kFloor), w[kGroup];
  for (int64_t g = 0; g < row.groups(); ++g) {
    if (std::fabs(row.mass()[g]) * per_weight < kNothing) continue;
    row.group(g, w);
    kTerms[static_cast<int>(isa())](per_weight, w);
    sum += sum64(w);
  }
  return sum;
}

}  // namespace sk
