// The inner loops of linear_int8 for one instruction set; linear_int8.cpp holds everything else.
#pragma once
#include <cstdint>

#include "cpu/isa.h"

namespace sk {

constexpr int kMaxTileRows = 8;

// A chunk of one scale group of one panel, and the rows of x that meet it.
struct Int8Tile {
  const uint8_t* w;  // [steps][16 channels][4]
  int64_t steps;
  const char* x;     // the rows' prepared words for these steps
  int64_t x_stride;  // in bytes
  int32_t* acc;      // [rows][16]: sums between the chunks of a group
  bool first, last;  // of the group's chunks: acc need not be read, need not be written
  // At the end of the group: y[r][channel] += f32(acc + offset[r]) * (sx[r] * sw[channel]).
  const int32_t* offset;
  int64_t offset_stride;
  const float* sx;
  int64_t sx_stride;
  const float* sw;
  float* y;         // [rows][16]
  int share, turn;  // how many tiles visit this chunk, and which of them this is: they share the prefetching
};

struct Int8Kernels {
  int rows;  // of x, at most, in one tile
  // Activations are prepared as 4 words of this many bytes per step of k: int8 in order, or (AVX2) int16 in the order
  // k0 k2 k1 k3, which is how a line's even and odd bytes meet them.
  int word_bytes;
  // One group of codes to words, zeros up to the end of the last step; returns -128 * (sum of the codes) modulo 2^32.
  int32_t (*prepare)(const int8_t* q, int64_t group, char* words);
  void (*dot[kMaxTileRows])(const Int8Tile& tile);  // dot[r - 1] takes r rows
};

const Int8Kernels& int8_kernels(Isa which);

}  // namespace sk
