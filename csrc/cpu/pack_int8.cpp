#include "cpu/pack_int8.h"

#include <cstring>
#include <memory>

#include "cpu/float_mode.h"
#include "cpu/group_codes.h"
#include "cpu/threads.h"

namespace sk {
namespace {

// The codes of one group of one row go to every 64th quadruple of bytes.
void scatter(const int8_t* q, int64_t group, uint8_t* line) {
  int64_t i = 0;
  for (; i + kStep <= group; i += kStep, line += kStepBytes) {
    uint32_t word;
    std::memcpy(&word, q + i, 4);
    word ^= 0x80808080u;  // w + 128
    std::memcpy(line, &word, 4);
  }
  for (int64_t j = 0; i + j < group; ++j) line[j] = static_cast<uint8_t>(q[i + j] ^ 0x80);
}

template <class T>
void pack_floats(const T* x, const Int8Shape& shape, float* rotated, int8_t* q, uint8_t* line, float* scale) {
  const GroupCodes<T> codes_of(shape.rotated, 1.0f);
  for (int64_t g = 0; g < shape.groups(); ++g) {
    codes_of(x + g * shape.group, shape.group, rotated, q, scale + g * kPanelRows);
    scatter(q, shape.group, line);
    line += shape.steps() * kStepBytes;
  }
}

void pack_codes(const int8_t* q, const float* s, int64_t scale_groups, const Int8Shape& shape, uint8_t* line,
                float* scale) {
  for (int64_t g = 0; g < shape.groups(); ++g) {
    scale[g * kPanelRows] = s[scale_groups == 1 ? 0 : g];
    scatter(q + g * shape.group, shape.group, line);
    line += shape.steps() * kStepBytes;
  }
}

}  // namespace

void pack_int8(const RowBlock& in, int64_t start, const Int8Matrix& out, int threads) {
  const Int8Shape& shape = out.shape;
  const int64_t first = start / kPanelRows, panels = (in.rows + kPanelRows - 1) / kPanelRows;
  parallel_for(threads, panels, 1, [&](int64_t begin, int64_t end) {
    const IeeeMode ieee;
    const std::unique_ptr<int8_t[]> q(new int8_t[static_cast<size_t>(shape.group)]);
    const std::unique_ptr<float[]> rotated(new float[shape.rotated ? static_cast<size_t>(shape.group) : 0]);
    for (int64_t p = begin; p < end; ++p) {
      uint8_t* codes = out.codes + (first + p) * shape.panel_bytes();
      float* scale = out.scale + (first + p) * shape.groups() * kPanelRows;
      std::memset(codes, 0x80, static_cast<size_t>(shape.panel_bytes()));
      std::memset(scale, 0, static_cast<size_t>(shape.groups() * kPanelRows) * sizeof(float));
      for (int64_t r = 0; r < kPanelRows && p * kPanelRows + r < in.rows; ++r) {
        const int64_t row = p * kPanelRows + r, at = row * in.stride;
        uint8_t* line = codes + r * kStep;
        switch (in.type) {
          case RowType::kF32:
            pack_floats(static_cast<const float*>(in.data) + at, shape, rotated.get(), q.get(), line, scale + r);
            break;
          case RowType::kF16:
            pack_floats(static_cast<const F16*>(in.data) + at, shape, rotated.get(), q.get(), line, scale + r);
            break;
          case RowType::kBF16:
            pack_floats(static_cast<const BF16*>(in.data) + at, shape, rotated.get(), q.get(), line, scale + r);
            break;
          case RowType::kInt8:
            pack_codes(static_cast<const int8_t*>(in.data) + at, in.scale + row * in.scale_stride, in.scale_groups,
                       shape, line, scale + r);
            break;
        }
      }
    }
  });
}

void rows_int8(const Int8Matrix& w, const int64_t* ids, int64_t count, float* out, int64_t out_stride, int threads) {
  const Int8Shape& shape = w.shape;
  const int64_t grain = 1 + (1 << 14) / shape.k;
  const RotateGroup<float> rotate = rotate_group<float>(isa());
  parallel_for(threads, count, grain, [&](int64_t begin, int64_t end) {
    const IeeeMode ieee;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t panel = ids[i] / kPanelRows, lane = ids[i] % kPanelRows;
      const uint8_t* line = w.codes + panel * shape.panel_bytes() + lane * kStep;
      const float* scale = w.scale + panel * shape.groups() * kPanelRows + lane;
      float* y = out + i * out_stride;
      for (int64_t g = 0; g < shape.groups(); ++g) {
        const float s = scale[g * kPanelRows];
        int64_t j = 0;
        for (; j + kStep <= shape.group; j += kStep, line += kStepBytes)
          for (int64_t b = 0; b < kStep; ++b) y[j + b] = static_cast<float>(line[b] - 128) * s;
        if (j < shape.group) {
          for (int64_t b = 0; j + b < shape.group; ++b) y[j + b] = static_cast<float>(line[b] - 128) * s;
          line += kStepBytes;
        }
        if (shape.rotated) rotate(y, shape.group, 1.0f / static_cast<float>(shape.group), y);
        y += shape.group;
      }
    }
  });
}

}  // namespace sk
