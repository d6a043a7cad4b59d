"""The Hadamard rotation of scale groups in Triton (../rotation.py is the definition), alone and before quantising."""

import triton
import triton.language as tl

from .codes import codes_of, grid_of, survey, widened


@triton.jit
def hadamard(x, B: tl.constexpr, L: tl.constexpr, STAGES: tl.constexpr):
    """x [B, L] with every 2^STAGES values times the Hadamard matrix: (a, b) -> (a + b, a - b), near pairs first."""
    for stage in tl.static_range(STAGES):
        pairs = tl.permute(tl.reshape(x, [B, L // (2 * 2**stage), 2, 2**stage]), (0, 1, 3, 2))
        a, b = tl.split(pairs)
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), [B, L])
    return x


@triton.jit
def rotated(x, B: tl.constexpr, L: tl.constexpr, STAGES: tl.constexpr):
    """x [B, L] with every 2^STAGES values times the Hadamard matrix / 2^STAGES."""
    return hadamard(x, B, L, STAGES) * (0.5**STAGES)


@triton.jit
def rotate_quantize_kernel(x, stride, q, scale, units, groups, B: tl.constexpr, L: tl.constexpr,
                           STAGES: tl.constexpr):  # fmt: skip
    """Programs of B groups of L = 2^STAGES values, counted through all rows."""
    unit = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    real = unit < units
    place = tl.arange(0, L)[None, :]
    start = unit // groups * stride + unit % groups * L
    v = widened(tl.load(x + start[:, None] + place, mask=real[:, None], other=0.0))
    v = rotated(v, B, L, STAGES)
    grid = grid_of(survey(v), True)
    tl.store(scale + unit, grid.scale, mask=real)
    tl.store(q + unit[:, None] * L + place, codes_of(v, grid, 0, True, False, False), mask=real[:, None])
