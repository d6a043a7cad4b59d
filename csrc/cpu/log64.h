// log in double for z >= 1, for one number or for a vector, to the same bits.
//
// z = 2^e * m with m in [sqrt(1/2), sqrt(2)), log m = 2 atanh(s), s = (m - 1)/(m + 1), by its series up to s^13: to
// 1e-12 absolute.
#pragma once
#include <cstdint>
#include <cstring>

namespace sk {

// D: double or a vector of them; U: uint64_t or a vector of as many.
template <class D, class U>
__attribute__((always_inline)) inline void log_in_place(D& z) {
  U bits;
  memcpy(&bits, &z, sizeof bits);
  const U e = (bits - 0x3fe6a09e667f3bcdu) >> 52;                       // less the bits of sqrt(1/2)
  const U e_bits = e | 0x4330000000000000u, m_bits = bits - (e << 52);  // 2^52 + e
  D exponent, m;
  memcpy(&exponent, &e_bits, sizeof exponent);
  memcpy(&m, &m_bits, sizeof m);
  const D s = (m - 1.0) / (m + 1.0), t = s * s;
  D p = t * (1.0 / 13.0) + 1.0 / 11.0;
  p = p * t + 1.0 / 9.0;
  p = p * t + 1.0 / 7.0;
  p = p * t + 1.0 / 5.0;
  p = p * t + 1.0 / 3.0;
  p = p * t + 1.0;
  z = (exponent - 4503599627370496.0) * 0.69314718055994530942 + (s + s) * p;
}

}  // namespace sk
