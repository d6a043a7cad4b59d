// A packed int8 matrix as ordinary rows of floats: what a library's dense product can multiply by.
#pragma once
#include "cpu/linear_int8.h"
#include "cpu/pack_int8.h"

namespace sk {

// out[i, j] = code * scale in f32, rotated back if need be, rounded once to the output's type.
void expand(const Int8Matrix& w, const OutRows& out, int threads);

}  // namespace sk
