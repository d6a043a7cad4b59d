"""The cpu backend: hands validated tensors to the C++ kernels as addresses, sizes and strides."""

# quantize family
from .gates import gelu_mul, gelu_mul_quantize_int8, silu_mul, silu_mul_quantize_int8
from .norms import layer_norm, layer_norm_quantize_int8, rms_norm, rms_norm_quantize_int8
from .quantize import dequantize_int8, quantize_int8

# linear family
from .linear import expand, linear_f32, linear_int8, pack_int8, rows_int8

# verify family
from .verify import sample, verify, verify_tree

# attention family
from .attention import attend_int8, rope_write_kv_int8

# decoder family
from .decoder import gated_mlp, rms_norm_linear, rope_attend

# ggml family
from .ggml import dequantize_ggml
