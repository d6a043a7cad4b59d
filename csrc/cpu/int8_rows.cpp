#include "cpu/int8_rows.h"

#include "cpu/even_grain.h"
#include "cpu/float_mode.h"
#include "cpu/group_codes.h"
#include "cpu/threads.h"

namespace sk {
namespace {

int64_t lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

Int8Rows::Int8Rows(const Int8Shape& of, int64_t rows, Scratch& scratch)
    : shape(of),
      kernel(int8_kernels(isa())),
      words_per_group(shape.steps() * kStep * kernel.word_bytes),
      // An odd number of cache lines, so that the rows do not all fall into the same few cache sets.
      stride((lines(shape.groups() * words_per_group) / 64 | 1) * 64),
      codes_stride_(lines(shape.group)),
      rotated_stride_(shape.rotated ? lines(shape.group * 4) : 0) {
  const int64_t table = lines(rows * shape.groups() * 4);
  words = scratch.get(static_cast<size_t>(rows * (stride + codes_stride_ + rotated_stride_) + 2 * table));
  codes_ = words + rows * stride;
  rotated_ = codes_ + rows * codes_stride_;
  offset = reinterpret_cast<int32_t*>(rotated_ + rows * rotated_stride_);
  own_scale_ = reinterpret_cast<float*>(rotated_ + rows * rotated_stride_ + table);
  scales_at(own_scale_, shape.groups(), shape.groups());
}

void Int8Rows::scales_at(const float* data, int64_t row_stride, int64_t groups) {
  scale = data, scale_stride = row_stride, scale_step = groups == 1 ? 0 : 1;
}

template <class T>
void Int8Rows::put(int64_t r, const T* x) const {
  const GroupCodes<T> codes_of(shape.rotated, 1.0f / static_cast<float>(shape.group));
  int8_t* codes = reinterpret_cast<int8_t*>(codes_ + r * codes_stride_);
  float* rotated = reinterpret_cast<float*>(rotated_ + r * rotated_stride_);
  float* s = own_scale_ + r * shape.groups();
  int32_t* sum = offset + r * shape.groups();
  char* to = words + r * stride;
  for (int64_t i = 0; i < shape.k; i += shape.group, ++s, ++sum, to += words_per_group) {
    codes_of(x + i, shape.group, rotated, codes, s);
    *sum = kernel.prepare(codes, shape.group, to);
  }
}
template void Int8Rows::put<float>(int64_t, const float*) const;
template void Int8Rows::put<F16>(int64_t, const F16*) const;
template void Int8Rows::put<BF16>(int64_t, const BF16*) const;

template <class T>
void Int8Rows::put_group(int64_t r, int64_t g, const T* x) const {
  const GroupCodes<T> codes_of(shape.rotated, 1.0f / static_cast<float>(shape.group));
  alignas(64) float rotated[kSmallGroup];
  alignas(64) int8_t codes[kSmallGroup];
  const int64_t at = r * shape.groups() + g;
  codes_of(x, shape.group, rotated, codes, own_scale_ + at);
  offset[at] = kernel.prepare(codes, shape.group, words + r * stride + g * words_per_group);
}
template void Int8Rows::put_group<float>(int64_t, int64_t, const float*) const;
template void Int8Rows::put_group<F16>(int64_t, int64_t, const F16*) const;
template void Int8Rows::put_group<BF16>(int64_t, int64_t, const BF16*) const;

void Int8Rows::put_codes(int64_t r, const int8_t* q) const {
  int32_t* sum = offset + r * shape.groups();
  char* to = words + r * stride;
  for (int64_t i = 0; i < shape.k; i += shape.group, ++sum, to += words_per_group)
    *sum = kernel.prepare(q + i, shape.group, to);
}

void Int8Rows::put_rows(const RowBlock& x, int64_t row0, int64_t begin, int64_t end) const {
  const IeeeMode ieee;
  for (int64_t r = begin; r < end; ++r) {
    const int64_t at = (row0 + r) * x.stride;
    switch (x.type) {
      case RowType::kF32: put(r, static_cast<const float*>(x.data) + at); break;
      case RowType::kF16: put(r, static_cast<const F16*>(x.data) + at); break;
      case RowType::kBF16: put(r, static_cast<const BF16*>(x.data) + at); break;
      case RowType::kInt8: put_codes(r, static_cast<const int8_t*>(x.data) + at); break;
    }
  }
}

void Int8Rows::put_block(const RowBlock& x, int64_t row0, int64_t rows, int threads) {
  parallel_for(threads, rows, row_grain(rows, shape.k, 0.6),
               [&](int64_t begin, int64_t end) { put_rows(x, row0, begin, end); });
  if (x.type == RowType::kInt8)
    scales_at(x.scale + row0 * x.scale_stride, x.scale_stride, x.scale_groups);
  else
    scales_at(own_scale_, shape.groups(), shape.groups());
}

}  // namespace sk
