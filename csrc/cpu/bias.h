// What a product adds to every row of its result.
#pragma once
#include <cstdint>

#include "sk/numerics.h"

namespace sk {

struct Bias {
  const void* data;  // null: none
  Dtype type;

  float operator[](int64_t n) const {
    return type == Dtype::kF32   ? static_cast<const float*>(data)[n]
           : type == Dtype::kF16 ? to_f32(static_cast<const F16*>(data)[n])
                                 : to_f32(static_cast<const BF16*>(data)[n]);
  }
};

}  // namespace sk
