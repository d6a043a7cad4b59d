// The left side of linear_int8: rows of x as codes, in the order in which the kernels read them.
//
// Two stages: `put` rows (any thread may put any row), then `multiply` them by the matrix (linear_int8.h). An operation
// that computes rows itself, say a norm, puts each row where it made it.
#pragma once
#include <cstdint>

#include "cpu/linear_int8_kernels.h"
#include "cpu/pack_int8.h"
#include "cpu/scratch.h"

namespace sk {

class Int8Rows {
 public:
  static constexpr int64_t kMost = 64;  // rows per sweep over the weights: their sums live on a stack

  // Room for `rows` <= kMost rows that meet matrices of this shape. The memory is the scratch's: until its next use.
  Int8Rows(const Int8Shape& shape, int64_t rows, Scratch& scratch);

  // Row r from floats: rotated if the matrix is, then quantised with the matrix's groups.
  template <class T>
  void put(int64_t r, const T* x) const;
  // Group g of row r, for groups of at most kSmallGroup; any thread may put any group.
  static constexpr int64_t kSmallGroup = 256;
  template <class T>
  void put_group(int64_t r, int64_t g, const T* x) const;
  // Row r from codes. Their scales are not copied: `scales_at` says where they are for all rows.
  void put_codes(int64_t r, const int8_t* q) const;
  void scales_at(const float* data, int64_t stride, int64_t groups);

  // Rows begin .. end from those of a block behind its first row0, whatever it holds. Scales of codes as above.
  void put_rows(const RowBlock& x, int64_t row0, int64_t begin, int64_t end) const;
  // Rows row0 .. row0 + rows of a block, on several threads if that is worth it.
  void put_block(const RowBlock& x, int64_t row0, int64_t rows, int threads);

  const Int8Shape shape;
  const Int8Kernels& kernel;
  const int64_t words_per_group, stride;  // in bytes: from group to group, from row to row
  char* words;                            // [rows][stride]
  int32_t* offset;                        // [rows][groups]: -128 * sum of the group's codes
  const float* scale;                     // of row r, group g: scale[r * scale_stride + g * scale_step]
  int64_t scale_stride, scale_step;

 private:
  const int64_t codes_stride_, rotated_stride_;
  char* codes_;       // [rows][codes_stride]: one group at a time, on its way from floats to words
  char* rotated_;     // [rows][rotated_stride]: the same group before it becomes codes, if the matrix is rotated
  float* own_scale_;  // [rows][groups], for floats
};

}  // namespace sk
