"""The cuda and hip backends: one set of kernels, compiled as _C_cuda by nvcc or as _C_hip by hipcc.

A backend is usable if its module was built and loads, the driver and a device are there, the module holds code for that
device, and this torch makes tensors for it. The first of these that fails is the reason.
"""

from types import SimpleNamespace

import torch

from .. import native
from . import attention, cache, fused, linear, quantize, verify


def load(backend):
    """(an object with the operations, None) or (None, why not), for "cuda" or "hip"."""
    compiled, reason = native.load_compiled(f"_C_{backend}")
    if compiled is None:
        return None, reason
    trouble = compiled.probe()
    if trouble is None and getattr(torch.version, backend) is None:
        trouble = f"this torch ({torch.__version__}) has no {backend} support"
    if trouble is not None:
        return None, f"_C_{backend} is built (for {compiled.archs}) but can't run here: {trouble}"
    return SimpleNamespace(**operations(compiled, _place)), None


def operations(compiled, place):
    """The operations that a compiled module serves. ``place(tensor)`` gives the device's number and a stream handle."""
    operations = {"attend_int8": attention.attend_int8}  # torch's own kernels
    for family in (verify, quantize, fused, linear, cache):
        operations |= family.bind(compiled, place)
    return operations


def _place(tensor):
    stream = torch.cuda.current_stream(tensor.device)
    return tensor.device.index, stream.cuda_stream
