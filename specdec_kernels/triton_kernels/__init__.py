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

    codes.py    the int8 formula and number formats;  tiles.py how rows are cut into units with one scale
    quantize.py, norms.py, gates.py (activations.py), rope.py, rows.py, expansion.py  operations on rows
    linear.py   linear_int8;  rotation.py rotated groups;  attention.py attend_int8
"""

import importlib
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


def _operation(module, name, place=0):
    """The operation ``name`` of a module here; the argument at ``place`` is a tensor on the call's device."""
    function = None

    def run(*args):
        nonlocal function
        if args[place].is_cpu != interpreted():
            cpu = args[place].is_cpu
            raise Unsupported("CPU tensors need TRITON_INTERPRET=1" if cpu else "the interpreter serves the CPU")
        if function is None:
            function = getattr(importlib.import_module("." + module, __name__), name)
        function(*args)

    run.__name__ = name
    return run


verify = _operation("chain", "verify")
verify_tree = _operation("tree", "verify_tree")
sample = _operation("plain", "sample")
quantize_int8 = _operation("quantize", "quantize_int8")
dequantize_int8 = _operation("quantize", "dequantize_int8")
rms_norm = _operation("norms", "rms_norm")
rms_norm_quantize_int8 = _operation("norms", "rms_norm_quantize_int8")
layer_norm = _operation("norms", "layer_norm")
layer_norm_quantize_int8 = _operation("norms", "layer_norm_quantize_int8")
silu_mul = _operation("gates", "silu_mul")
silu_mul_quantize_int8 = _operation("gates", "silu_mul_quantize_int8")
gelu_mul = _operation("gates", "gelu_mul")
gelu_mul_quantize_int8 = _operation("gates", "gelu_mul_quantize_int8")
linear_int8 = _operation("linear", "linear_int8")
rows_int8 = _operation("rows", "rows_int8")
expand = _operation("expansion", "expand", 1)
rope_write_kv_int8 = _operation("rope", "rope_write_kv_int8", 1)  # after q, which may be None
attend_int8 = _operation("attention", "attend_int8")
