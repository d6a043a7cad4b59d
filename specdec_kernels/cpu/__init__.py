"""The cpu backend: hands validated tensors to the C++ kernels as addresses, sizes and strides."""

# quantize family

# linear family

# verify family

# attention family

# ggml family
