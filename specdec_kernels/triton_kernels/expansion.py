"""expand: a packed weight matrix as ordinary rows of floats (a file must not have the operation's name, see notes.md).

A program writes B groups of one row each, as a tile [B, L]. The groups of a panel's 16 rows are neighbours among the
programs' units, so that a tile of short groups uses every byte of the lines that it reads. Rotated groups are rotated
back (rotation.py).
"""

import triton
import triton.language as tl

from ..int8_weight import PANEL, STEP
from ..registry import Unsupported
from .codes import store_rounded
from .launch import launch, on_device
from .rotation import rotated
from .tiles import LONGEST, TILE, rows_of, tile

PIECE = TILE // PANEL  # values of a group at a time, so that 16 rows make a tile


@triton.jit
def expand_kernel(
    codes, scale, out, out_stride, n, groups, group, steps,
    PANEL: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, B: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Programs (B units, L of their values); a unit is a group of a row. STAGES > 0: rotated, in groups of 2^STAGES."""
    unit = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    place = unit // PANEL  # of the group among those of all panels
    lane = unit - place * PANEL
    panel = place // groups
    g = place - panel * groups
    row = panel * PANEL + lane
    real = row < n
    at = tl.program_id(1) * L + tl.arange(0, L)[None, :]
    inside = real[:, None] & (at < group)
    s = tl.load(scale + unit, mask=real, other=0.0)  # [panels][groups][16]: as units are counted
    step = place[:, None] * steps + at // STEP
    code = tl.load(codes + step * (PANEL * STEP) + lane[:, None] * STEP + at % STEP, mask=inside, other=128)
    y = (code ^ 128).to(tl.int8, bitcast=True).to(tl.float32) * s[:, None]
    if STAGES > 0:
        y = rotated(y, B, L, STAGES)
    store_rounded(out + row[:, None] * out_stride + g[:, None] * group + at, y, inside)


def expand(weight, out):
    group = weight.group_size
    if weight.rotated and group > LONGEST:
        raise Unsupported(f"rotated groups of {group} values: a program holds {LONGEST}")
    together, long, threads = tile(group, LONGEST if weight.rotated else PIECE)
    units = weight.codes.shape[0] * PANEL * weight.groups
    with on_device(out):
        launch(
            expand_kernel, (triton.cdiv(units, together), triton.cdiv(group, long)), threads,
            weight.codes, weight.scale, out, rows_of(out)[1], weight.n, weight.groups, group, -(-group // STEP),
            PANEL=PANEL, STEP=STEP, STAGES=long.bit_length() - 1 if weight.rotated else 0, B=together, L=long,
        )  # fmt: skip
