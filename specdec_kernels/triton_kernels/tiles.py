"""How rows are cut for the int8 kernels: what the host and the kernels agree on.

A unit is what has one scale: a group of a row, or the row. A program takes B units as a tile [B, L], L the next power
of two of their length, so that short ones share a program; units beyond LONGEST values are read in several tiles.
"""

import triton
import triton.language as tl

from ..validate import row_stride
from .launch import padded

TILE = 1024  # values per program, where units are short: 8 per thread
LONGEST = 1 << 14  # values of one unit that a program holds in registers


def rows_of(tensor):
    """(number of rows, elements from one to the next) of [..., H], H > 0."""
    return tensor.numel() // tensor.shape[-1], row_stride(tensor)


def per_unit(value):
    """How the kernels find a unit's scale or zero point: (tensor or None, step per row, step per group)."""
    if value is None:
        return None, 0, 0
    if value.numel() == 1:
        return value, 0, 0
    return value, row_stride(value), int(value.shape[-1] > 1)


def tile(length, longest=LONGEST):
    """(B, L, threads) for units of ``length`` values."""
    long = min(padded(length, 1), longest)
    together = max(TILE // long, 1)
    return together, long, min(max(together * long // 8, 128), 512)


@triton.jit
def units_of(units, groups, B: tl.constexpr):
    """The program's units, their rows and their groups in the row, each [B]; int64 where there are that many."""
    u = tl.program_id(0).to(units.dtype) * B + tl.arange(0, B)
    row = u // groups
    return u, row, u - row * groups
