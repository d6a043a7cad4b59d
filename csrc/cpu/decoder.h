// A decoder layer in few calls. Each is other operations one after another, with what lies between them in buffers that
// the calling thread keeps.
#pragma once
#include <variant>

#include "cpu/attention.h"
#include "cpu/linear_f32.h"
#include "cpu/linear_int8.h"
#include "cpu/quantize.h"

namespace sk {

using Matrix = std::variant<Int8Matrix, FloatMatrix>;  // a FloatMatrix for rows of f32 only

// Rows of the norm's dtype.
struct PlainRows {
  void* data;
  int64_t stride;  // in elements
};

// The output of `norm` and its threads are set here.
void rms_norm_linear(const NormArgs& norm, const Matrix& weight, const Bias& bias, const PlainRows& out,
                     int threads);
void gated_mlp(const NormArgs& norm, const Matrix& gate_up, Gate gate, const Matrix& down, const PlainRows& out,
               int threads);

const char* rope_attend(const RopeWrite& write, const Attend& attention, int threads);  // a message as in attention.h

}  // namespace sk
