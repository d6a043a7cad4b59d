// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
// A counter-based generator: the same (key, counter) gives the same words on every backend, in any order, on any
// number of threads. The contract names what goes into key and counter; only this file knows how to mix them.
#pragma once
#include <cstdint>

#include "sk/numerics.h"

namespace sk {

struct Philox4 {
  uint32_t w[4];
};

SK_HD Philox4 philox4x32(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(0xD2511F53u) * c0, p1 = static_cast<uint64_t>(0xCD9E8D57u) * c2;
    const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0, n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// What a random number is for; never reuse one number for two purposes.
enum class Stream : uint32_t { kDraft = 0, kCoin = 1, kLast = 2, kPlain = 3, kRound = 4 };

// u in [0, 1) with 32 bits: word 0 at counter (position, stream << 24 | index, group), key = seed.
SK_HD double uniform(uint64_t seed, uint64_t position, Stream stream, uint32_t index, uint32_t group) {
  const uint32_t c2 = (static_cast<uint32_t>(stream) << 24) | index;
  const Philox4 r = philox4x32(seed, static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), c2, group);
  return static_cast<double>(r.w[0]) * 2.3283064365386962890625e-10;  // 2^-32, exact
}

}  // namespace sk
