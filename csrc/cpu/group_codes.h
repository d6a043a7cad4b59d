// The codes of one scale group on either side of linear_int8: rotated first if the matrix is.
#pragma once
#include "cpu/quantize.h"
#include "cpu/rotate.h"

namespace sk {

template <class T>
class GroupCodes {
 public:
  GroupCodes(bool rotated, float factor)
      : rotated_(rotated),
        factor_(factor),
        rotate_(rotate_group<T>(isa())),
        from_type_(quantize_group<T>(isa())),
        from_f32_(quantize_group<float>(isa())) {}

  // `room`: n floats if the matrix is rotated.
  void operator()(const T* x, int64_t n, float* room, int8_t* q, float* scale) const {
    if (!rotated_) return from_type_(x, n, QuantizeRule(), 0, q, scale, nullptr);
    rotate_(x, n, factor_, room);
    from_f32_(room, n, QuantizeRule(), 0, q, scale, nullptr);
  }

 private:
  bool rotated_;
  float factor_;
  RotateGroup<T> rotate_;
  QuantizeGroup<T> from_type_;
  QuantizeGroup<float> from_f32_;
};

}  // namespace sk
