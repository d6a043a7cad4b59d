"""What the int8 operations share: reading arguments about rows and groups; outputs, new or the caller's, checked."""

import torch

from . import native, validate
from .validate import integer


def readable(name, value):
    """``value`` as a tensor [..., H] whose rows are evenly spaced."""
    if value.dim() == 0:
        raise ValueError(f"{name}: expected at least 1 dimension, got a scalar")
    if value.is_contiguous():
        return value
    validate.rows(name, value)
    if validate.row_stride(value) is not None:
        return value
    native.not_recordable(f"{name} had to be copied: its rows are not evenly spaced")
    return value.contiguous()


def group_length(group_size, cols):
    """Values per scale: ``group_size``, or the whole row of ``cols``."""
    if group_size is None:
        return cols
    group_size = integer("group_size", group_size)
    if group_size < 1 or cols % group_size:
        raise ValueError(f"group_size: expected a divisor of the last dimension {cols}, got {group_size}")
    return group_size


def code_outputs(x, shape, group, symmetric, out, inputs, outputs):
    """(q, scale) or, if not symmetric, (q, scale, zero_point) for rows of ``shape``: new, or ``out`` once checked.

    ``inputs`` and ``outputs`` name the call's other tensors: what out must not overlap, and what is checked with it. A
    row of no values still has one scale.
    """
    per_group = (*shape[:-1], shape[-1] // group if group else 1)
    if out is None:
        if outputs:
            validate.disjoint(outputs, inputs)
        q = x.new_empty(shape, dtype=torch.int8)
        scale = x.new_empty(per_group, dtype=torch.float32)
        return (q, scale) if symmetric else (q, scale, x.new_empty(per_group, dtype=torch.int32))
    count = 2 if symmetric else 3
    if not isinstance(out, (tuple, list)) or len(out) != count:
        names = "(q, scale)" if symmetric else "(q, scale, zero_point)"
        got = f"{len(out)} tensors" if isinstance(out, (tuple, list)) else type(out).__name__
        raise TypeError(f"out: expected {names}, got {got}")
    device = x.device
    outputs["out[0]"] = validate.output("out[0]", out[0], torch.int8, shape, device)
    outputs["out[1]"] = validate.output("out[1]", out[1], torch.float32, per_group, device)
    if not symmetric:
        outputs["out[2]"] = validate.output("out[2]", out[2], torch.int32, per_group, device)
    validate.disjoint(outputs, inputs)
    return tuple(out)


def group_count(cols, *per_group):
    """How many groups a row has whose scale and zero point (None allowed) are ``per_group``, and their length."""
    groups = 1
    for value in per_group:
        if value is not None and value.numel() != 1:
            groups = max(groups, value.shape[-1])
    return groups, cols // groups
