// The Hadamard rotation of one scale group (specdec_kernels/rotation.py says what for): y = x H * factor in f32.
//
// Steps h = 1, 2, 4, ... < n replace each pair (a, b) at distance h by (a + b, a - b). The order of the additions is
// part of the definition; how many steps share one pass over the group is not.
#pragma once
#include <cstdint>

#include "cpu/isa.h"
#include "sk/numerics.h"

namespace sk {

// n: a power of two. y may be x. `factor` multiplies last, one rounding.
template <class T>
using RotateGroup = void (*)(const T* x, int64_t n, float factor, float* y);

template <class T>
RotateGroup<T> rotate_group(Isa isa);  // the kernel for that instruction set; T = float, F16, BF16

}  // namespace sk
