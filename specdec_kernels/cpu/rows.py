"""How the compiled functions of the quantise family get tensors: as addresses, sizes and strides."""

from ..validate import row_stride

NONE = 0, 0, 0  # no zero point, no sums: null address


def rows_of(value):
    """Number of rows, their length, and the elements from one to the next."""
    shape = value.shape
    cols = shape[-1]
    rows = value.numel() // cols if cols else shape[:-1].numel()
    return rows, cols, cols if value.is_contiguous() else row_stride(value)


def per_group(value):
    """Address, row stride and group stride of a scale, zero point or sum: one value, one per row, or one per group."""
    if value.numel() == 1:
        return value.data_ptr(), 0, 0
    return value.data_ptr(), row_stride(value), (0 if value.shape[-1] == 1 else 1)


def values(out):
    """A fused operation's output: rows in the input's dtype."""
    return out.data_ptr(), row_stride(out), 0, 0, 0, *NONE, *NONE


def codes(group, q, scale, sums):
    """A fused operation's output: codes, scales and, unless None, sums."""
    return 0, 0, q.data_ptr(), row_stride(q), group, *per_group(scale), *(NONE if sums is None else per_group(sums))
