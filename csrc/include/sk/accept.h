// The decisions of verification, shared by host and device: what a random number decides, and how.
//
// Streams, indices and groups are those of philox.h. A draw takes the ids in groups of 64: group g of mass m > 0 races
// with the time E/m, E = -log1p(-u) exponential; the earliest wins, the lowest on ties (the exponential race, a Gumbel
// draw in other words). Inside the winner a second number picks the id by its running sum. So a draw costs one Philox
// call per 64 ids, and no split of the vocabulary can change it.
#pragma once
#include <cmath>
#include <cstdint>

#include "sk/philox.h"

namespace sk {

// Bits of a request's flags.
enum Flag : int32_t {
  kHardTarget = 1,   // an examined target row had NaN or +inf
  kNoCandidate = 2,  // the row that had to give the last token has no candidate
  kBadValue = 4,     // a bad value met where it could not be checked beforehand
  kBadDraft = 8,     // an examined draft row was unusable
};

constexpr int kGroup = 64;               // ids per group
constexpr uint32_t kPick = 0x80000000u;  // counters of the second number of a draw start here

// What one draw's numbers are keyed by.
struct Noise {
  uint64_t seed, position;
  Stream stream;
  uint32_t index;

  SK_HD double race(int64_t group) const { return uniform(seed, position, stream, index, static_cast<uint32_t>(group)); }
  SK_HD double pick(int64_t group) const {
    return uniform(seed, position, stream, index, static_cast<uint32_t>(group) + kPick);
  }
};

// Coin i of the round, in [0, 1).
SK_HD double coin(uint64_t seed, uint64_t position, uint32_t i) { return uniform(seed, position, Stream::kCoin, i, 0); }

// The token rule (Leviathan et al. 2211.17192): with the round's coin i, accept iff u*q < p.
SK_HD bool accept_token(uint64_t seed, uint64_t position, uint32_t i, double q, double p) {
  return coin(seed, position, i) * q < p;
}

// Block and traversal verification (Sun et al. 2403.10444, 2505.12398): with what chance h = S/(S + 1 - r), S = sum
// max(r*p - q, 0), drafts that could go on end here. Never above r.
SK_HD double block_chance(double s, double r) {
  const double all = s + (1.0 - r);
  return all > 0.0 ? s / all : 1.0;
}

SK_HD double exponential(double u) { return -log1p(-u); }

// Orders floats as integers: a larger float has a larger key; -0 and 0 share one. No NaN.
SK_HD uint32_t order_key(float x) {
  const uint32_t u = bits_of(x + 0.0f);
  return (u & 0x80000000u) ? ~u : u | 0x80000000u;
}
SK_HD float of_order_key(uint32_t key) { return float_of((key & 0x80000000u) ? key & 0x7fffffffu : ~key); }

}  // namespace sk
