"""rows_int8: rows of a packed weight matrix, dequantised (an embedding read out of the tied head).

A program writes B groups of a row, as a tile [B, L] of one group each (int8_weight.py is the layout). The groups of a
rotated matrix are rotated back: times the Hadamard matrix, over its size (rotation.py). A bad id, which the host can't
see, gives a row of NaN.
"""

import triton
import triton.language as tl

from ..int8_weight import PANEL, STEP
from ..registry import Unsupported
from .codes import store_rounded
from .launch import launch, on_device
from .rotation import rotated
from .tiles import LONGEST, rows_of, tile


@triton.jit
def rows_kernel(
    ids, codes, scale, out, out_stride, n, groups, group, steps,
    PANEL: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, B: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Programs (row of out, B groups, L of their values). STAGES > 0: rotated, in groups of L = 2^STAGES."""
    i = tl.program_id(0).to(tl.int64)
    id_ = tl.load(ids + i)
    good = (id_ >= 0) & (id_ < n)
    id_ = tl.where(good, id_, 0)
    panel = id_ // PANEL
    lane = id_ - panel * PANEL
    g = tl.program_id(1) * B + tl.arange(0, B)
    at = tl.program_id(2) * L + tl.arange(0, L)[None, :]
    inside = (g < groups)[:, None] & (at < group)
    s = tl.load(scale + (panel * groups + g) * PANEL + lane, mask=(g < groups) & good, other=float("nan"))
    step = (panel * groups + g)[:, None] * steps + at // STEP
    code = tl.load(codes + step * (PANEL * STEP) + lane * STEP + at % STEP, mask=inside & good, other=0)
    y = (code ^ 128).to(tl.int8, bitcast=True).to(tl.float32) * s[:, None]
    if STAGES > 0:
        y = rotated(y, B, L, STAGES)
    store_rounded(out + i * out_stride + g[:, None] * group + at, y, inside)


def rows_int8(ids, weight, out):
    if out.numel() == 0:
        return
    group = weight.group_size
    if weight.rotated and group > LONGEST:
        raise Unsupported(f"rotated groups of {group} values: a program holds {LONGEST}")
    together, long, threads = tile(group, LONGEST if weight.rotated else 1024)
    with on_device(out):
        launch(
            rows_kernel, (len(ids), triton.cdiv(weight.groups, together), triton.cdiv(group, long)), threads,
            ids, weight.codes, weight.scale, out, rows_of(out)[1], weight.n, weight.groups, group, -(-group // STEP),
            PANEL=PANEL, STEP=STEP, STAGES=long.bit_length() - 1 if weight.rotated else 0, B=together, L=long,
        )  # fmt: skip
