// rope_write_kv_int8: rotates q in place, rotates k, and writes k and v into a paged cache of floats or int8 codes.
//
// A unit is one head of one token: a query head, a key head or a value head. A wave takes a unit. A pair (i, i + D/2)
// is rotated by one lane, computed anew where it is needed: a head is short, and stays in the first-level cache. Where
// several tokens have the same slot the last one wins: before a block writes anything for a token, it looks whether a
// later token has its slot.
// Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
#pragma once
#include "sk/gpu/codes.cuh"

#include "gpu/launch.h"

namespace sk::gpu {

constexpr int kRopeThreads = 256;

// The rotated value i of a head in f32, already rounded to T.
template <class T>
struct RotatedHead {
  const T* x;
  const float *cos, *sin;
  int64_t half;
  __device__ float low(int64_t i) const {  // of pair i
    return rounded(to_f32(x[i]) * cos[i] - to_f32(x[i + half]) * sin[i]);
  }
  __device__ float high(int64_t i) const { return rounded(to_f32(x[i + half]) * cos[i] + to_f32(x[i]) * sin[i]); }
  __device__ float operator()(int64_t i) const { return i < half ? low(i) : high(i - half); }
  __device__ static float rounded(float y) { return to_f32(from_f32<T>(y)); }
};

template <class T>
struct PlainHead {
  const T* x;
  __device__ float operator()(int64_t i) const { return to_f32(x[i]); }
};

template <class Team, class Head>
__device__ void write_head(const Head& head, int64_t n, const KvCache& cache, int64_t page, int64_t place, int64_t h) {
  const int64_t start = page * cache.strides[0] + place * cache.strides[1] + h * cache.strides[2];
  if (cache.scale != nullptr) {
    uint32_t most = 0;
    for (int64_t i = Team::rank(); i < n; i += Team::size()) most = Max()(most, magnitude_of(head(i)));
    const Grid grid = symmetric_grid(float_of(Team::reduce(most, Max())));
    int8_t* const codes = static_cast<int8_t*>(cache.data) + start;
    for (int64_t i = Team::rank(); i < n; i += Team::size())
      codes[i] = grid.blank ? int8_t{0} : quantize_member(head(i), grid);
    if (Team::rank() == 0)
      cache.scale[page * cache.scale_strides[0] + place * cache.scale_strides[1] + h * cache.scale_strides[2]] =
          grid.scale;
    return;
  }
  for (int64_t i = Team::rank(); i < n; i += Team::size()) {
    const float y = head(i);
    switch (cache.dtype) {
      case Dtype::kF32: static_cast<float*>(cache.data)[start + i] = y; break;
      case Dtype::kF16: static_cast<F16*>(cache.data)[start + i] = from_f32<F16>(y); break;
      case Dtype::kBF16: static_cast<BF16*>(cache.data)[start + i] = from_f32<BF16>(y); break;
    }
  }
}

// Whether token t is to be written: its slot is in the cache, and no later token has it. The same for all threads.
template <class Block>
__device__ bool keeps_slot(const RopeWrite& a, int64_t t) {
  const int64_t slot = a.slots[t];
  int taken = 0;
  for (int64_t later = t + 1 + Block::rank(); later < a.tokens && !taken; later += Block::size())
    taken = a.slots[later] == slot;
  taken = Block::reduce(taken, Max());
  return !taken && slot >= 0 && slot < a.pages * a.page_size;
}

// Blocks parts * t .. parts * t + parts - 1 share the units of token t.
template <class T>
__global__ void __launch_bounds__(kRopeThreads, 2) rope_write_kernel(const RopeWrite a, int parts) {
  using Team = WaveTeam<kRopeThreads>;
  using Block = BlockTeam<kRopeThreads>;
  const int64_t half = a.dim / 2, units = a.q_heads + 2 * a.kv_heads;
  const int waves = kRopeThreads / wave(), mine = threadIdx.x / wave();
  for (int64_t block = Block::first(); block < a.tokens * parts; block += Block::step()) {
    const int64_t t = divide(block, parts), part = block - t * parts;
    const float *cos = a.cos + t * a.cos_stride, *sin = a.sin + t * a.sin_stride;
    const int64_t slot = a.slots[t];
    const bool kept = keeps_slot<Block>(a, t);
    const int64_t page = kept ? divide(slot, a.page_size) : 0, place = slot - page * a.page_size;
    for (int64_t unit = part * waves + mine; unit < units; unit += int64_t{parts} * waves) {
      if (unit < a.q_heads) {
        T* const q = static_cast<T*>(a.q) + t * a.q_stride + unit * a.dim;
        const RotatedHead<T> head{q, cos, sin, half};
        for (int64_t i = Team::rank(); i < half; i += Team::size()) {
          const float low = head.low(i), high = head.high(i);
          q[i] = from_f32<T>(low), q[i + half] = from_f32<T>(high);
        }
      } else if (kept && unit < a.q_heads + a.kv_heads) {
        const int64_t h = unit - a.q_heads;
        const T* const k = static_cast<const T*>(a.k) + t * a.k_stride + h * a.dim;
        write_head<Team>(RotatedHead<T>{k, cos, sin, half}, a.dim, a.k_cache, page, place, h);
      } else if (kept) {
        const int64_t h = unit - a.q_heads - a.kv_heads;
        const T* const v = static_cast<const T*>(a.v) + t * a.v_stride + h * a.v_dim;
        write_head<Team>(PlainHead<T>{v}, a.v_dim, a.v_cache, page, place, h);
      }
    }
  }
}

}  // namespace sk::gpu
