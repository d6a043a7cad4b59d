"""Kernels for speculative decoding: verification, int8, attention; on CUDA, ROCm, CPU, and pure PyTorch if need be.

Importing this package never fails because a compiled part is missing or broken; ``python -m specdec_kernels`` says what
can be used here and why the rest can't.
"""

from .capture import capture
from .recording import Recording, record
from .registry import BackendUnavailable, backends, forced_backend, use_backend

# quantize family
from .gates import gelu_mul, gelu_mul_quantize_int8, silu_mul, silu_mul_quantize_int8
from .norms import layer_norm, layer_norm_quantize_int8, rms_norm, rms_norm_quantize_int8
from .quantize import dequantize_int8, quantize_int8

# linear family
from .expand import expand
from .large_pages import LargePages
from .linear import Int8Weight, linear_f32, linear_int8, pack_int8

# verify family
from .sample import sample
from .verify import Verdict, verify
from .verify_tree import TreeVerdict, verify_tree

# attention family
from .attention import attend_int8, rope_write_kv_int8

# decoder family
from .decoder import gated_mlp, rms_norm_linear, rope_attend

# ggml family
from .ggml import dequantize_ggml

__version__ = "0.1.0"
