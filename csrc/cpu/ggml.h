// Decoding of ggml's block formats to f32 (see ggml.cpp).
#pragma once
#include <cstdint>

namespace sk {

// The order of specdec_kernels/ggml.py's table.
enum class GgmlKind : int32_t { kF32, kF16, kBF16, kQ4_0, kQ4_1, kQ8_0, kQ4_K, kQ6_K, kCount };

// Row r starts at blocks + r * row_stride (bytes) and holds blocks_per_row blocks; its elements go to
// out + r * out_stride (floats).
void dequantize_ggml(int threads, GgmlKind kind, const uint8_t* blocks, int64_t row_stride, float* out,
                     int64_t out_stride, int64_t rows, int64_t blocks_per_row);

}  // namespace sk
