"""The triton backend: the operations as Triton kernels, for CUDA and ROCm tensors.

With TRITON_INTERPRET=1 in the environment the kernels run on CPU tensors instead, slowly, for tests; they then serve
only those who ask for the backend by name. Triton itself is imported by the first call.

    survey.py   first launch: all rows, split over the vocabulary, to a few numbers per 64 ids
    settle.py   second launch, only with filters: every row's support and total
    chain.py    last launch of verify: one program per request walks its rows, decides and draws
    tree.py     last launch of verify_tree: one program per request walks its tree
    tree_state.py  what the nodes that it refuses leave of p
    plain.py    last launch of sample: one program per row draws
    row.py      what a row of logits stands for;  proposal.py what a draft was drawn from
    draw.py     the race of a draw;  philox.py its random numbers;  launch.py the host's part
    linear.py   linear_int8;  attention.py  attend_int8

    codes.py    the int8 formula and number formats;  tiles.py how rows are cut into units with one scale
    quantize.py, norms.py, gates.py, activations.py, rope.py, rows.py  the int8 operations on rows
"""

import importlib.util
import os

import torch

from ..registry import Unsupported


def interpreted():
    return os.environ.get("TRITON_INTERPRET") == "1"


def unusable():
    """Why the backend can't serve any call here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (it is in the extra specdec-kernels[triton])"
    if not interpreted() and not torch.cuda.is_available():
        return f"no GPU that this torch ({torch.__version__}) can use; TRITON_INTERPRET=1 runs the kernels on the CPU"
    return None


def _check_device(tensor):
    if tensor.is_cpu != interpreted():
        raise Unsupported("CPU tensors need TRITON_INTERPRET=1" if tensor.is_cpu else "the interpreter serves the CPU")


def verify(target_logits, *args):
    _check_device(target_logits)
    from .chain import verify

    verify(target_logits, *args)


def verify_tree(target_logits, *args):
    _check_device(target_logits)
    from .tree import verify_tree

    verify_tree(target_logits, *args)


def sample(logits, *args):
    _check_device(logits)
    from .plain import sample

    sample(logits, *args)


# ---- products and attention -----------------------------------------------------------------------------------------


def linear_int8(x, *args):
    _check_device(x)
    from .linear import linear_int8

    linear_int8(x, *args)


def attend_int8(q, *args):
    _check_device(q)
    from .attention import attend_int8

    attend_int8(q, *args)


# ---- the quantise family ---------------------------------------------------------------------------------------------


def quantize_int8(x, *args):
    _check_device(x)
    from .quantize import quantize_int8

    quantize_int8(x, *args)


def dequantize_int8(q, *args):
    _check_device(q)
    from .quantize import dequantize_int8

    dequantize_int8(q, *args)


def silu_mul(gate_up, *args):
    _check_device(gate_up)
    from .gates import silu_mul

    silu_mul(gate_up, *args)


def silu_mul_quantize_int8(gate_up, *args):
    _check_device(gate_up)
    from .gates import silu_mul_quantize_int8

    silu_mul_quantize_int8(gate_up, *args)


def gelu_mul(gate_up, *args):
    _check_device(gate_up)
    from .gates import gelu_mul

    gelu_mul(gate_up, *args)


def gelu_mul_quantize_int8(gate_up, *args):
    _check_device(gate_up)
    from .gates import gelu_mul_quantize_int8

    gelu_mul_quantize_int8(gate_up, *args)


def rms_norm(x, *args):
    _check_device(x)
    from .norms import rms_norm

    rms_norm(x, *args)


def rms_norm_quantize_int8(x, *args):
    _check_device(x)
    from .norms import rms_norm_quantize_int8

    rms_norm_quantize_int8(x, *args)


def layer_norm(x, *args):
    _check_device(x)
    from .norms import layer_norm

    layer_norm(x, *args)


def layer_norm_quantize_int8(x, *args):
    _check_device(x)
    from .norms import layer_norm_quantize_int8

    layer_norm_quantize_int8(x, *args)


def rope_write_kv_int8(q, k, *args):
    _check_device(k)
    from .rope import rope_write_kv_int8

    rope_write_kv_int8(q, k, *args)


def rows_int8(ids, *args):
    _check_device(ids)
    from .rows import rows_int8

    rows_int8(ids, *args)
