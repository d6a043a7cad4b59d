// Packs: 16 bytes of a row, the unit in which threads read and write, and rows that a team holds in registers.
//
// Pack p of a row belongs to thread p % size() of the team that works on it, whatever the alignment. Where a row does
// not start on a 16-byte boundary, or ends inside a pack, the values are moved one by one.
#pragma once
#include "sk/gpu/compat.h"  // first: the vendor's memcpy has to be known before numerics.h uses it

#include "sk/numerics.h"

namespace sk::gpu {

// kCount consecutive values, moved as one word where the address allows it.
template <class T, int kCount>
struct alignas(kCount * sizeof(T)) Pack {
  T v[kCount];
};

template <class T>
constexpr int kPackOf = 16 / sizeof(T);

template <class T>
using PackOf = Pack<T, kPackOf<T>>;

template <class P>
__device__ bool aligned(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % alignof(P) == 0;
}

// kCount values from `i` on; those at or beyond n are 0, which widens no range.
template <int kCount, class T>
__device__ Pack<T, kCount> load_pack(const T* x, int64_t i, int64_t n, bool whole) {
  if (whole && i + kCount <= n) return *reinterpret_cast<const Pack<T, kCount>*>(x + i);
  Pack<T, kCount> pack;
#pragma unroll
  for (int k = 0; k < kCount; ++k) pack.v[k] = i + k < n ? x[i + k] : T{};
  return pack;
}

template <class T, int kCount>
__device__ void store_pack(const Pack<T, kCount>& pack, T* out, int64_t i, int64_t n, bool whole) {
  if (whole && i + kCount <= n) {
    *reinterpret_cast<Pack<T, kCount>*>(out + i) = pack;
    return;
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k)
    if (i + k < n) out[i + k] = pack.v[k];
}

// Reading, in packs of T: a row of n values.
template <class T>
struct RowIn {
  const T* data;
  int64_t n;
  bool whole;
  __device__ RowIn(const void* base, int64_t offset, int64_t count)
      : data(static_cast<const T*>(base) + offset), n(count), whole(aligned<PackOf<T>>(data)) {}
  __device__ PackOf<T> operator()(int64_t i) const { return load_pack<kPackOf<T>>(data, i, n, whole); }
};

constexpr int kHeld = 4;

// The packs of a row of n values: the first kHeld of every thread stay in its registers, further ones are made again
// whenever they are needed. So a row of up to kHeld * 16 bytes * size() is read once.
//
// Registers can't be indexed. Unrolling every loop over them would multiply the code, until fetching it takes longer
// than the work of a short row; so the loops stay loops, and a pack is picked by selects.
template <class T, class Team>
class HeldRow {
 public:
  // load(i) gives the pack of the values from i on. Unrolled, so that the loads wait together: it should do no more.
  template <class Load>
  __device__ HeldRow(int64_t n, const Load& load) : n_(n) {
#pragma unroll
    for (int h = 0; h < kHeld; ++h) put(h, h, place(h) < n_ ? load(place(h)) : PackOf<T>{});
  }

  // visit(pack, i) for the packs of this thread, in ascending order; again(i) gives those that are not held.
  template <class Again, class Visit>
  __device__ void each(const Again& again, const Visit& visit) const {
#pragma unroll 1
    for (int h = 0; place(h) < n_; ++h) visit(h < kHeld ? pick(h) : again(place(h)), place(h));
  }

  // Replaces the held packs by change(pack, i), and calls beyond(i) for the others.
  template <class Change, class Beyond>
  __device__ void change(const Change& change, const Beyond& beyond) {
#pragma unroll 1
    for (int h = 0; place(h) < n_; ++h) {
      if (h >= kHeld) {
        beyond(place(h));
        continue;
      }
      const PackOf<T> pack = change(pick(h), place(h));
#pragma unroll
      for (int j = 0; j < kHeld; ++j) put(j, h, pack);
    }
  }

  __device__ int64_t size() const { return n_; }

 private:
  __device__ static int64_t step() { return static_cast<int64_t>(Team::size()) * kPackOf<T>; }
  __device__ static int64_t place(int h) { return static_cast<int64_t>(Team::rank()) * kPackOf<T> + h * step(); }

  __device__ PackOf<T> pick(int h) const {
    uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      words[w] = held_[0][w];
#pragma unroll
      for (int j = 1; j < kHeld; ++j) words[w] = h == j ? held_[j][w] : words[w];
    }
    PackOf<T> pack;
    memcpy(&pack, words, sizeof pack);
    return pack;
  }
  __device__ void put(int j, int h, const PackOf<T>& pack) {
    uint32_t words[4];
    memcpy(words, &pack, sizeof pack);
#pragma unroll
    for (int w = 0; w < 4; ++w) held_[j][w] = h == j ? words[w] : held_[j][w];
  }

  uint32_t held_[kHeld][4];
  int64_t n_;
};

// a / b without the long division of 64 bits where 32 do.
__device__ inline int64_t divide(int64_t a, int64_t b) {
  if (((a | b) >> 31 >> 1) == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

}  // namespace sk::gpu
