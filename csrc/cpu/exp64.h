// exp in double for weights of logits, for one number or for a vector, to the same bits.
//
// exp(x) = 2^n * exp(r), n = round(x / ln 2), |r| <= ln 2 / 2 (Cody & Waite: ln 2 in two parts), exp(r) by its Taylor
// polynomial of degree 9: relative error below 1e-11. For x <= 0 only; results below 2^-1022 are subnormal as they
// should be, those below 2^-1075 zero.
#pragma once
#include <cstdint>
#include <cstring>

namespace sk {

// D: double or a vector of them; U: uint64_t or a vector of as many.
template <class D, class U>
__attribute__((always_inline)) inline void exp_in_place(D& x) {
  const double kRound = 6755399441055744.0;  // 1.5 * 2^52: adding it leaves the rounded integer in the low bits
  x = x > -746.0 ? x : D{} - 746.0;
  const D shifted = x * 1.4426950408889634 + kRound;
  const D n = shifted - kRound;
  const D r = (x - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10;
  D p = r * (1.0 / 362880.0) + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  // 2^n in two steps of half the exponent each, so that a subnormal result is rounded once, at the end. n + 2048 >= 0.
  U biased;
  memcpy(&biased, &shifted, sizeof biased);
  biased += 2048u - 0x4338000000000000u;
  const U half = biased >> 1;
  const U low_bits = half << 52, high_bits = (biased - half) << 52;  // exponents n/2 + 1024: too high by one, each
  D low, high;
  memcpy(&low, &low_bits, sizeof low);
  memcpy(&high, &high_bits, sizeof high);
  x = (p * 0.5) * low * (high * 0.5);
}

}  // namespace sk
