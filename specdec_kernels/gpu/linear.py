"""linear_int8 on the GPU. The arguments' form: reference/linear.py."""

import torch

from ..native import DTYPE_CODE
from ..registry import Unsupported

UNIT = -1  # what multiplies (LinearUnit in csrc/gpu/launch.h); -1 = as suits the call and the device
LONGEST_ROTATION = 4096  # values that a block has room for (csrc/gpu/launch.h, too)
_CODES = 3


def bind(compiled, place):
    """The operations of this family on top of a compiled module."""

    def linear_int8(x, scale, weight, bias, out):
        rows = x.shape[0]
        if weight.rotated and weight.group_size > LONGEST_ROTATION:
            raise Unsupported(f"rotates groups of at most {LONGEST_ROTATION} values, got {weight.group_size}")
        # Its size follows from shapes alone. It is torch's, and so goes back in the order of the stream: nothing waits,
        # and a CUDA graph keeps it.
        size = compiled.plan_linear(rows, weight.k, weight.group_size)
        workspace = torch.empty(size, dtype=torch.uint8, device=x.device)
        compiled.linear_int8(
            DTYPE_CODE.get(x.dtype, _CODES),
            x.data_ptr(),
            rows,
            x.stride(0),
            *((0, 0, 0) if scale is None else (scale.data_ptr(), scale.stride(0), int(scale.shape[1] > 1))),
            *weight.native,
            *((0, 0) if bias is None else (bias.data_ptr(), DTYPE_CODE[bias.dtype])),
            out.data_ptr(),
            DTYPE_CODE[out.dtype],
            out.stride(0),
            workspace.data_ptr(),
            UNIT,
            *place(x),
        )

    return {"linear_int8": linear_int8}
