"""What the int8 operations share: reading arguments about rows and groups; outputs, new or the caller's, checked."""

import torch

from . import native, validate
from .validate import integer

_LONGEST_SUM = 2**24  # so many codes of -128 add up to the lowest int32


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


def group_length(group_size, cols, return_sums=False):
    """Values per scale: ``group_size``, or the whole row of ``cols``."""
    group = cols
    if group_size is not None:
        group = integer("group_size", group_size)
        if group < 1 or cols % group:
            raise ValueError(f"group_size: expected a divisor of the last dimension {cols}, got {group}")
    if return_sums and group > _LONGEST_SUM:
        raise ValueError(f"group_size: expected at most {_LONGEST_SUM} with return_sums (int32), got {group}")
    return group


def code_outputs(x, shape, group, symmetric, return_sums, out, inputs, outputs):
    """(q, scale[, zero_point][, sums]) for rows of ``shape``: new, or ``out`` once checked.

    ``inputs`` and ``outputs`` name the call's other tensors: what out must not overlap, and what is checked with it. A
    row of no values still has one scale, and one sum.
    """
    per_group = (*shape[:-1], shape[-1] // group if group else 1)
    more = (0 if symmetric else 1) + (1 if return_sums else 0)
    if out is None:
        if outputs:
            validate.disjoint(outputs, inputs)
        q = x.new_empty(shape, dtype=torch.int8)
        scale = x.new_empty(per_group, dtype=torch.float32)
        if more == 0:
            return q, scale
        return q, scale, *(x.new_empty(per_group, dtype=torch.int32) for _ in range(more))
    count = 2 + more
    if not isinstance(out, (tuple, list)) or len(out) != count:
        names = f"(q, scale{'' if symmetric else ', zero_point'}{', sums' if return_sums else ''})"
        got = f"{len(out)} tensors" if isinstance(out, (tuple, list)) else type(out).__name__
        raise TypeError(f"out: expected {names}, got {got}")
    device = x.device
    outputs["out[0]"] = validate.output("out[0]", out[0], torch.int8, shape, device)
    outputs["out[1]"] = validate.output("out[1]", out[1], torch.float32, per_group, device)
    for i in range(2, count):
        outputs[f"out[{i}]"] = validate.output(f"out[{i}]", out[i], torch.int32, per_group, device)
    validate.disjoint(outputs, inputs)
    return tuple(out)


def plain_output(x, shape, out, inputs, outputs):
    """Values of x's dtype: new, or ``out`` once checked; ``inputs`` and ``outputs`` as for code_outputs."""
    if out is None:
        out = x.new_empty(shape)
    else:
        outputs["out"] = validate.output("out", out, x.dtype, shape, x.device)
    if outputs:
        validate.disjoint(outputs, inputs)
    return out


def group_count(cols, *per_group):
    """How many groups a row has whose scale and zero point (None allowed) are ``per_group``, and their length."""
    groups = 1
    for value in per_group:
        if value is not None and value.numel() != 1:
            groups = max(groups, value.shape[-1])
    return groups, cols // groups
