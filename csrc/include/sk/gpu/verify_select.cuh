// Selection: the shortest prefix of the order (logit descending, id ascending) that holds a number of ids or a mass.
//
// An id's place in the order is one integer, its rank: the logit's ordered bits above, the id turned round below. A
// prefix is "all ranks from cut on", and so is what top-k, top-p and min-p keep together. The cut is found by narrowing
// an interval of ranks: a histogram of it in 2048 bins says in which bin the prefix ends, until that bin holds one id.
// Masses are integers of 2^-40, added in shared memory: exact, and so in any order.
#pragma once
#include "sk/gpu/reduce.cuh"
#include "sk/gpu/verify_source.cuh"

namespace sk::gpu {

constexpr int kBinBits = 11, kBins = 1 << kBinBits;
constexpr int kChunks = kBins / kGroup;           // runs of bins that are passed over at once
constexpr double kMassUnit = 1099511627776.0;  // 2^40
static_assert(kBins == kChunks * kTeam * kQuad && kChunks % kTeams == 0);

// Maps (logit, id) of one row to ranks.
struct Ranks {
  int drop;     // low bits of a key that are the same in all numbers of the dtype
  int id_bits;  // as many as hold every id

  __device__ static Ranks of_row(const Source& row) {
    Ranks ranks{row.dtype == Dtype::kBF16 ? 16 : row.dtype == Dtype::kF16 ? 13 : 0, 0};
    while ((int64_t{1} << ranks.id_bits) < row.size) ++ranks.id_bits;
    return ranks;
  }
  __device__ uint64_t last_id() const { return (uint64_t{1} << id_bits) - 1; }
  __device__ uint64_t of(float logit, int64_t id) const {
    return (static_cast<uint64_t>(order_key(logit) >> drop) << id_bits) | (last_id() - static_cast<uint64_t>(id));
  }
  // The ranks of all ids of this logit; for a number that the dtype lacks, of the next one below.
  __device__ uint64_t first(float logit) const { return of(logit, 0) & ~last_id(); }
  __device__ uint64_t last(float logit) const { return of(logit, 0); }
  // The lowest rank of a number >= logit.
  __device__ uint64_t from(double logit) const {
    float x = static_cast<float>(fmax(logit, -static_cast<double>(FLT_MAX)));
    uint64_t key = order_key(x) >> drop;
    while (static_cast<double>(number(key)) < logit) ++key;
    return key << id_bits;
  }
  // Everything that is a candidate: above -inf.
  __device__ uint64_t lowest() const { return ((static_cast<uint64_t>(order_key(-INFINITY)) >> drop) + 1) << id_bits; }

 private:
  __device__ float number(uint64_t key) const {
    uint32_t bits = static_cast<uint32_t>(key << drop);
    if (!(bits & 0x80000000u)) bits |= (1u << drop) - 1;  // of a negative number all bits are turned round
    return of_order_key(bits);
  }
};

struct Bin {
  uint32_t count, low, high;  // of the mass
  __device__ uint64_t mass() const { return static_cast<uint64_t>(high) << 32 | low; }
};

// A 64-bit addition in two halves: 32-bit atomics are native in shared memory everywhere, 64-bit ones are a loop.
__device__ inline void add(Bin& bin, uint64_t mass) {
  const uint32_t low = static_cast<uint32_t>(mass);
  fetch_add(&bin.count, 1u);
  const uint32_t carry = fetch_add(&bin.low, low) > ~low;
  const uint32_t high = static_cast<uint32_t>(mass >> 32) + carry;
  if (high != 0) fetch_add(&bin.high, high);
}

struct Need {
  bool by_mass;
  uint64_t amount;  // of ids, or of mass in units of 1 / kMassUnit

  __device__ bool met(uint64_t count, uint64_t mass) const { return (by_mass ? mass : count) >= amount; }
};

struct Prefix {
  uint64_t cut;  // the lowest rank in it, or between that and the next one
  double mass;
};

struct Histogram {
  Bin bins[kBins], chunks[kChunks];
};

// `visit(low, high, f)` calls f(rank, mass) for every id whose rank is in [low, high]. The prefix of `need`, or all from
// `low` on if that is less. All threads of the block take part and get the same result.
template <class Visit>
__device__ Prefix select(Histogram& shared, uint64_t low, uint64_t high, const Need& need, const Visit& visit) {
  Bin *const bins = shared.bins, *const chunks = shared.chunks;
  uint64_t above_count = 0, above_mass = 0;
  // Goes down from entry `from` to the one in which the prefix ends; to - 1 if it needs more than they hold.
  const auto descend = [&](const Bin* entries, int from, int to) {
    for (; from >= to; --from) {
      const Bin entry = entries[from];
      if (entry.count == 0) continue;
      if (need.met(above_count + entry.count, above_mass + entry.mass())) break;
      above_count += entry.count;
      above_mass += entry.mass();
    }
    return from;
  };
  for (;;) {
    int shift = 0;
    while ((high - low) >> shift >= kBins) ++shift;
    for (int b = threadIdx.x; b < kBins; b += kWideBlock) bins[b] = {0, 0, 0};
    __syncthreads();
    visit(low, high, [&](uint64_t rank, uint64_t mass) { add(bins[(rank - low) >> shift], mass); });
    __syncthreads();
    for (int c = team(); c < kChunks; c += kTeams) {
      uint32_t count = 0;
      uint64_t mass = 0;
#pragma unroll
      for (int j = 0; j < kQuad; ++j) {
        const Bin bin = bins[c * kGroup + j * kTeam + lane_of_team()];
        count += bin.count;
        mass += bin.mass();
      }
      count = reduce_lanes<kTeam>(count, Sum());
      mass = reduce_lanes<kTeam>(mass, Sum());
      if (lane_of_team() == 0) chunks[c] = {count, static_cast<uint32_t>(mass), static_cast<uint32_t>(mass >> 32)};
    }
    __syncthreads();
    const int chunk = descend(chunks, kChunks - 1, 0);
    const int b = chunk < 0 ? -1 : descend(bins, (chunk + 1) * kGroup - 1, chunk * kGroup);
    const Bin bin = b < 0 ? Bin{0, 0, 0} : bins[b];
    __syncthreads();  // the next use clears them
    const Prefix found{b < 0 ? low : low + (static_cast<uint64_t>(b) << shift),
                       static_cast<double>(above_mass + bin.mass()) / kMassUnit};
    if (bin.count <= 1 || (!need.by_mass && above_count + bin.count == need.amount)) return found;
    low = found.cut;
    const uint64_t end = low + ((uint64_t{1} << shift) - 1);
    high = end < high ? end : high;
  }
}

}  // namespace sk::gpu
