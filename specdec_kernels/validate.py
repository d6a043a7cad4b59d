"""Checks that stand between a caller and a raw pointer. Every message names the argument, what was expected, what came.

The first test of each function is the whole check for a good tensor; only a bad one pays for finding the right words.
"""

import operator
import weakref

import torch
from torch import Tensor, strided

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def tensor(name, value, dtypes, ndim=None, device=None):
    """Refuses anything but a plain strided tensor with one of ``dtypes`` (and ``ndim`` dimensions, on ``device``)."""
    if (
        type(value) is Tensor
        and value.dtype in dtypes
        and value.layout is strided
        and not value.requires_grad
        and not value.is_neg()
        and (ndim is None or value.ndim == ndim)
        and (not value.is_meta if device is None else value.device == device)
    ):
        return value
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(value).__name__}")
    if value.dtype not in dtypes:
        raise TypeError(f"{name}: expected dtype {_names(dtypes)}, got {_name(value.dtype)}")
    if value.layout is not strided:
        raise ValueError(f"{name}: expected a dense (strided) tensor, got layout {value.layout}")
    if device is None and value.is_meta:
        raise ValueError(f"{name}: expected a tensor with data, got one on the meta device")
    if value.requires_grad:
        raise ValueError(f"{name}: expected a tensor that does not require grad (these kernels have no backward)")
    if value.is_neg():
        raise ValueError(f"{name}: expected a tensor with its signs in memory, got a negated view (see resolve_neg)")
    if ndim is not None and value.dim() != ndim:
        raise ValueError(f"{name}: expected {ndim} dimensions, got shape {list(value.shape)}")
    if device is not None and value.device != device:
        raise ValueError(f"{name}: expected a tensor on {device} like the first one, got one on {value.device}")
    return value


def vector(name, value, dtypes, length, device):
    """Refuses anything but a plain tensor [length] with one of ``dtypes``, on ``device``."""
    tensor(name, value, dtypes, 1, device)
    if value.numel() != length:
        raise ValueError(f"{name}: expected shape [{length}], got {list(value.shape)}")
    return value


_looked_at = None  # of the last ids that were good: (the tensor, its version, what they were below)


def ascending(ids, stop):
    """Whether int32 ids, at least one, ascend strictly within [0, stop).

    The same ids come with every round: a tensor that torch has not written to since is not looked at again. (Who writes
    past torch is safe all the same: the kernels put no id where it does not belong.)
    """
    global _looked_at
    version = None if ids.is_inference() else ids._version
    if version is not None and _looked_at is not None:
        last, *then = _looked_at
        if last() is ids and then == [version, stop]:
            return True
    good = int(ids[0]) >= 0 and int(ids[-1]) < stop and bool((ids[1:] > ids[:-1]).all())
    if good and version is not None:
        _looked_at = weakref.ref(ids), version, stop
    return good


def integer(name, value):
    """``value`` as a Python int: ints and what counts as one (NumPy's), but no bool."""
    if type(value) is int:
        return value
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise TypeError(f"{name}: expected an integer, got {type(value).__name__}")


def device_type(value):
    """``value.device.type``, which costs more than a small kernel's work to build, for the usual case at once."""
    return "cpu" if value.is_cpu else value.device.type


def shape(name, value, expected):
    """Refuses a tensor whose shape is not ``expected`` (a tuple of ints)."""
    if tuple(value.shape) != tuple(expected):
        raise ValueError(f"{name}: expected shape {list(expected)}, got {list(value.shape)}")
    return value


def rows(name, value):
    """Refuses a tensor whose last dimension is strided; rows may be any distance apart."""
    strides = value.stride()
    if strides and strides[-1] != 1 and value.shape[-1] > 1 and value.numel():
        raise ValueError(f"{name}: expected a contiguous last dimension, got strides {list(strides)}")
    return value


def row_stride(value):
    """Elements from one row of a [..., H] tensor to the next, or None if its rows are not evenly spaced."""
    if value.is_contiguous():
        return value.shape[-1]
    strides = value.stride()
    if len(strides) == 2:
        return strides[0]
    first = step = None
    for size, stride in zip(reversed(value.shape[:-1]), reversed(strides[:-1]), strict=True):
        if size == 1:
            continue
        if first is None:
            first = stride
        elif stride != step:
            return None
        step = stride * size
    return value.shape[-1] if first is None else first


def output(name, value, dtype, shape, device):
    """Refuses an output of another kind, or whose rows are strided inside, unevenly spaced, or lie on each other."""
    if (
        type(value) is torch.Tensor
        and value.dtype is dtype
        and value.layout is torch.strided
        and value.shape == shape
        and value.device == device
        and value.is_contiguous()
        and not value.requires_grad
        and not value.is_neg()
    ):
        return value
    tensor(name, value, (dtype,), None, device)
    if value.shape != shape:
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(value.shape)}")
    if not value.is_contiguous():
        rows(name, value)
        stride = row_stride(value)
        if stride is None or (stride < shape[-1] and value.numel() > shape[-1]):
            raise ValueError(
                f"{name}: expected evenly spaced rows that don't overlap, got strides {list(value.stride())}"
            )
    return value


def disjoint(outputs, inputs):
    """Refuses an output that shares memory with an input or another output; both are dicts of name and tensor.

    Rows of one tensor may lie between the rows of another.
    """
    taken = []
    for value in inputs.values():
        start = value.data_ptr()
        taken.append((start, start + value.nbytes if value.is_contiguous() else _end(value)))
    for value in outputs.values():
        start = value.data_ptr()
        end = start + value.nbytes if value.is_contiguous() else _end(value)
        for other_start, other_end in taken:
            if start < other_end and other_start < end:
                _refuse_overlap(outputs, inputs)
        taken.append((start, end))


def _refuse_overlap(outputs, inputs):
    """Finds the pair whose spans overlap, and lets it pass if only the spans do."""
    taken = dict(inputs)
    for name, value in outputs.items():
        for other_name, other in taken.items():
            start, other_start = value.data_ptr(), other.data_ptr()
            touch = max(start, other_start) < min(_end(value), _end(other))
            if touch and not _interleaved(value, other, other_start - start):
                raise ValueError(f"{name}: expected memory of its own, got a tensor that overlaps {other_name}")
        taken[name] = value


def no_overlap(name, out, other_name, other):
    """Refuses an output that shares memory with another tensor."""
    disjoint({name: out}, {other_name: other})


def outside(name, out, spans):
    """Refuses an output that reaches into a weight's memory, given as (first, last + 1) addresses."""
    start = out.data_ptr()
    end = start + out.nbytes if out.is_contiguous() else _end(out)
    for first, last in spans:
        if start < last and first < end:
            raise ValueError(f"{name}: expected memory of its own, got a tensor that overlaps the weight")


def _end(value):
    """The address behind the last byte."""
    if value.numel() == 0:
        return value.data_ptr()
    last = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    return value.data_ptr() + (last + 1) * value.element_size()


def _interleaved(a, b, offset):
    """Whether the rows of a and b, ``offset`` bytes apart, take turns in memory: equal strides, no common byte."""
    steps = row_stride(a), row_stride(b)
    if None in steps or steps[0] * a.element_size() != steps[1] * b.element_size() or steps[0] == 0:
        return False
    gap = offset % (steps[0] * a.element_size())
    row_a, row_b = a.shape[-1] * a.element_size(), b.shape[-1] * b.element_size()
    return row_a <= gap and gap + row_b <= steps[0] * a.element_size()


def _name(dtype):
    return str(dtype).removeprefix("torch.")


def _names(dtypes):
    return " or ".join(_name(d) for d in dtypes)
