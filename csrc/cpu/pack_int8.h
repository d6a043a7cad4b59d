// The packed form of an int8 weight matrix, "i8-panel16x4" version 2, and what moves rows into and out of it.
//
// 16 weight rows make a panel. Inside a panel the k axis goes in steps of 4, and each step is one cache line:
// 16 rows x 4 consecutive k, one byte each. So a kernel reads a panel front to back, one activation word (4 bytes,
// broadcast) meets 16 output channels at once, every lane of a vector is an output channel of its own, and no sum
// across lanes is ever needed. The line is exactly one operand of the AVX-512 VNNI dot product; AVX2 splits it into
// even and odd bytes with one mask and one shift. A byte holds w + 128: VNNI wants one unsigned operand, and putting
// the offset on the weights means that the correction, -128 * sum(x), is one number per activation row and group
// instead of a table beside the weights. It is exact for every int8 value, because the arithmetic is modulo 2^32. Each
// scale group starts a new step; bytes and rows that exist only as padding hold w = 0. Scales: f32, per panel
// [groups][16]. One layout for all instruction sets. A rotated matrix holds the codes of W H (rotate.h).
#pragma once
#include <cstdint>

#include "sk/numerics.h"

namespace sk {

constexpr int64_t kPanelRows = 16;
constexpr int64_t kStep = 4;                        // k values per step
constexpr int64_t kStepBytes = kPanelRows * kStep;  // one cache line

// What a row of numbers is made of: the float types of Dtype, or int8 codes with scales beside them.
enum class RowType : int32_t { kF32 = 0, kF16 = 1, kBF16 = 2, kInt8 = 3 };

struct Int8Shape {
  int64_t n, k, group;
  bool rotated;  // group is a power of two then
  int64_t groups() const { return k / group; }
  int64_t steps() const { return (group + kStep - 1) / kStep; }  // per group
  int64_t panels() const { return (n + kPanelRows - 1) / kPanelRows; }
  int64_t panel_bytes() const { return groups() * steps() * kStepBytes; }
};

struct Int8Matrix {
  Int8Shape shape;
  uint8_t* codes;  // [panels][groups * steps][16][4]
  float* scale;    // [panels][groups][16]
};

// Rows in ordinary order: floats, or codes with `scale` [rows, groups].
struct RowBlock {
  RowType type;
  const void* data;
  int64_t rows, stride;  // stride in elements
  const float* scale;
  int64_t scale_stride, scale_groups;  // 1 (or groups) scales per row
};

// Writes rows start.. of the matrix (start a multiple of 16), rotating floats if the matrix is rotated and quantising
// them by the library's one formula. The rest of the last panel that it touches is padded, so a call must end at a
// panel's end or at the last row.
void pack_int8(const RowBlock& rows, int64_t start, const Int8Matrix& out, int threads);

// out[i, :] = code * scale of row ids[i], in f32, rotated back if need be: the embedding lookup of a model that shares
// this matrix with its head.
void rows_int8(const Int8Matrix& w, const int64_t* ids, int64_t count, float* out, int64_t out_stride, int threads);

}  // namespace sk
