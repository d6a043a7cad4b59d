// The inner loops of linear_int8 for one instruction set; linear_int8.cpp holds everything else.
#pragma once
#include <cstdint>

#include "cpu/isa.h"

namespace sk {

constexpr int kMaxTileRows = 12;

// A stretch of one panel, and the rows of x that meet it: some whole scale groups, or (groups = 1) a part of one.
struct Int8Tile {
  const uint8_t* w;  // [groups][steps][16 channels][4]
  int64_t groups, steps;
  const char* x;              // the rows' prepared words for these groups and steps
  int64_t x_stride, x_group;  // in bytes, from row to row and from group to group
  int32_t* acc;               // [rows][16]: sums between the parts of a group
  bool first, last;           // of the group's parts: acc need not be read, need not be written
  // Where a group begins and ends: sum = offset + ..., y[r][channel] += f32(sum) * (sx[r] * sw[channel]).
  const int32_t* offset;  // [rows][groups]
  int64_t offset_stride;
  const float* sx;
  int64_t sx_stride, sx_group;
  const float* sw;  // [groups][16]
  float* y;         // [rows][16]
  int share, turn;  // how many tiles visit this stretch, and which of them this is: they share the prefetching
};

struct Int8Kernels {
  int rows;  // of x, at most, in one tile
  // Activations are prepared as 4 words of this many bytes per step of k: int8 in order, or (AVX2) int16 in the order
  // k0 k2 k1 k3, which is how a line's even and odd bytes meet them.
  int word_bytes;
  // One group of codes to words, zeros up to the end of the last step. Returns what corrects the sums for the 128 in
  // the weights' bytes: -128 * (sum of the codes) modulo 2^32, or 0 if the kernel takes the 128 off itself.
  int32_t (*prepare)(const int8_t* q, int64_t group, char* words);
  void (*dot[kMaxTileRows])(const Int8Tile& tile);  // dot[r - 1] takes r rows
};

const Int8Kernels& int8_kernels(Isa which);

#if SK_NEON
const Int8Kernels& int8_neon();  // linear_int8_neon.cpp
#if SK_DOTPROD
const Int8Kernels& int8_dotprod();
#endif
#endif

}  // namespace sk
