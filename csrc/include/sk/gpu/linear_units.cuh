// What multiplies a round of a panel with rows of x. A unit is a wave; it keeps int32 sums per (channel, row) over the
// rounds of one group, and adds them to shared memory at the group's end. Weights are stored as code + 128; flipping
// the top bit of each byte gives the code, as exact for -128 as for any other.
#pragma once
#include "sk/gpu/linear_layout.cuh"
#include "sk/gpu/quantize.cuh"

namespace sk::gpu {

constexpr uint32_t kFlip = 0x80808080u;

// Dot products of four: every GPU has them. A lane takes 16 bytes of the weights, which are one step of 4 channels, so
// that a wave covers wave() / 4 steps at once, in 64-byte lines.
template <int kRowsOfX, bool kAhead>
struct DotUnit {
  static constexpr bool kRunsHere = true;
  static constexpr int kRows = kRowsOfX;       // of x per pass over the weights
  static constexpr int kFlight = 8;            // loads of weights that each lane has under way
  static constexpr int kBlocks = 2;            // per multiprocessor, as far as registers go
  static constexpr bool kWordsAhead = kAhead;  // those of x are loaded with the weights, not when they are needed
  static constexpr int kQuad = 4, kQuads = kPanel / kQuad;  // channels of a lane; lanes of a step
  struct Weights {
    uint32_t w[kQuad];
  };
  struct Words {
    uint32_t x[kRows];
  };
  __device__ static int lane() { return threadIdx.x % wave(); }
  __device__ static int steps() { return wave() / kQuads; }  // at once

  // From step `step` of a group of `steps`; beyond its end 0.
  __device__ static Weights weights(const uint8_t* group, int step, int steps) {
    Weights out{};
    step += lane() / kQuads;
    if (step < steps) {
      const auto at = reinterpret_cast<const Pack<uint32_t, kQuad>*>(group + static_cast<int64_t>(step) * kStepBytes);
      const auto pack = at[lane() % kQuads];
#pragma unroll
      for (int i = 0; i < kQuad; ++i) out.w[i] = pack.v[i];
    }
    return out;
  }

  // Of rows first .. first + count - 1 in the same steps.
  __device__ static Words words(const XWords& x, int64_t first, int count, int64_t round, int step, int steps) {
    Words out{};
    step += lane() / kQuads;
    if (step < steps) {
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        if (r < count) out.x[r] = x.row(first + r, round + step / kRoundSteps)[word_of(step % kRoundSteps)];
    }
    return out;
  }

  int32_t sum[kRows][kQuad];

  __device__ void clear() {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int i = 0; i < kQuad; ++i) sum[r][i] = 0;
  }

  __device__ void multiply(const Weights& weights, const Words& words, int count) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      const uint32_t w = weights.w[i] ^ kFlip;  // also of a step that does not exist: its words of x are 0
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        if (r < count) sum[r][i] = dot4(w, words.x[r], sum[r][i]);
    }
  }

  // The lanes of a quad hold the same channels: each keeps half of them, then half of that, then all add up.
  __device__ void add_to(uint32_t* total, int count) {
    const bool upper = lane() & kQuads, odd = lane() & 2 * kQuads;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= count) continue;
      int32_t* const s = sum[r];
      const int32_t a = upper ? s[2] : s[0], b = upper ? s[3] : s[1];
      const int32_t low = a + shuffle_xor(upper ? s[0] : s[2], kQuads);
      const int32_t high = b + shuffle_xor(upper ? s[1] : s[3], kQuads);
      int32_t mine = (odd ? high : low) + shuffle_xor(odd ? low : high, 2 * kQuads);
      for (int distance = 4 * kQuads; distance < wave(); distance *= 2) mine += shuffle_xor(mine, distance);
      if (lane() < 4 * kQuads)
        fetch_add(&total[r * kPanel + lane() % kQuads * kQuad + 2 * upper + odd], static_cast<uint32_t>(mine));
    }
  }
};

// The matrix unit of sm_80 and of CDNA (compat.h says which element a lane holds). On 32 lanes channels 2r and 2r + 1
// stand for its rows r and r + 8, so that a lane's two channels are 8 neighbouring bytes, and four steps one 256-byte
// piece; on 64 lanes a lane has one channel.
template <int kRowsOfX>
struct MatrixUnit {
  static constexpr bool kRunsHere = kMatrixUnit;
  static constexpr int kRows = kRowsOfX;
  static constexpr bool kWordsAhead = kRows <= 2 * kTileRows;
  static constexpr int kFlight = kWordsAhead ? 8 : 4, kBlocks = kWordsAhead ? 2 : 1;
  static constexpr int kTiles = kRows / kTileRows;  // at most: a unit of 64 lanes takes two at once
  static constexpr int kHalf = kRoundSteps / 2;
  struct Weights {
    uint32_t w[4];
  };
  struct Words {
    uint32_t x[kTiles][2];
  };
  __device__ static int lane() { return threadIdx.x % wave(); }
  __device__ static int steps() { return kRoundSteps; }
  __device__ static bool paired() { return wave() == kSmallestWave; }
  __device__ static int columns() { return wave() / 4; }                           // rows of x at once
  __device__ static int row() { return paired() ? lane() / 4 : lane() % kPanel; }  // r and j of compat.h
  __device__ static int word() { return paired() ? lane() % 4 : lane() / kPanel; }

  __device__ static Weights weights(const uint8_t* group, int step, int steps) {
    Weights out{};
    const uint8_t* const at = group + static_cast<int64_t>(step + word()) * kStepBytes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (step + word() + half * kHalf >= steps) continue;
      const uint8_t* const from = at + half * kHalf * kStepBytes;
      if (paired()) {
        const auto pack = reinterpret_cast<const Pack<uint32_t, 2>*>(from)[row()];
        out.w[2 * half] = pack.v[0], out.w[2 * half + 1] = pack.v[1];
      } else {
        out.w[half] = reinterpret_cast<const uint32_t*>(from)[row()];
      }
    }
    return out;
  }

  __device__ static Words words(const XWords& x, int64_t first, int count, int64_t round, int step, int) {
    Words out{};
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const int r = t * columns() + row();
      if (r >= count) continue;
      const auto pack =
          reinterpret_cast<const Pack<uint32_t, 2>*>(x.row(first + r, round + step / kRoundSteps))[word()];
      out.x[t][0] = pack.v[0], out.x[t][1] = pack.v[1];
    }
    return out;
  }

  int32_t sum[kTiles][4];

  __device__ void clear() {
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[t][i] = 0;
  }

  __device__ void multiply(const Weights& weights, const Words& words, int count) {
    const uint32_t* const w = weights.w;
    const uint32_t four[4] = {w[0] ^ kFlip, w[1] ^ kFlip, w[2] ^ kFlip, w[3] ^ kFlip}, two[2] = {four[0], four[1]};
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if (t * columns() >= count) continue;
      if (paired())
        matrix_multiply(sum[t], four, words.x[t]);
      else
        matrix_multiply(sum[t], two, words.x[t]);
    }
  }

  __device__ void add_to(uint32_t* total, int count) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int channel = paired() ? 2 * row() + i / 2 : 4 * word() + i;
        const int r = t * columns() + (paired() ? 2 * word() + i % 2 : row());
        if (r < count) fetch_add(&total[r * kPanel + channel], static_cast<uint32_t>(sum[t][i]));
      }
    }
  }
};

}  // namespace sk::gpu
