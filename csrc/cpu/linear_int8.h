// y = x * w^T for int8 weights in panels (pack_int8.h): the product that a decoder pass consists of.
#pragma once
#include "cpu/bias.h"
#include "cpu/int8_rows.h"
#include "cpu/pack_int8.h"

namespace sk {

struct OutRows {
  void* data;
  Dtype type;
  int64_t stride;  // in elements
};

// y[m, n] = sum over groups, ascending, of f32(acc) * f32(s_x * s_w), acc the exact int32 dot product of the codes;
// then the bias, then one rounding to the output type. x: floats (rotated if the
// weights are, and quantised here, with the weight's groups) or codes (for weights that are not rotated).
void linear_int8(const RowBlock& x, const Int8Matrix& w, const Bias& bias, const OutRows& out, int threads);

// The second half of it: rows 0 .. rows of x, which were put before, to the rows row0 .. of out. x was made for a
// matrix with w's k, group and rotation; n may differ.
void multiply(const Int8Rows& x, int64_t rows, const Int8Matrix& w, const Bias& bias, const OutRows& out,
              int64_t row0, int threads);

// The same for outputs begin .. end alone, on the calling thread; begin is a multiple of 16, and where it goes is where
// out begins.
void multiply_outputs(const Int8Rows& x, int64_t rows, const Int8Matrix& w, const Bias& bias, int64_t begin,
                      int64_t end, const OutRows& out);

}  // namespace sk
