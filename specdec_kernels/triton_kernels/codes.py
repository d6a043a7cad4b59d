"""The int8 formula in Triton, and the number formats around it (csrc/include/sk/quantize.h says the same in C++).

Tiles are [B, L]: B groups of values that share a scale, padded with zeros to L. All arithmetic is IEEE float32: true
divisions (``/`` is approximate), no contraction (launch.py). A group is judged by the bit patterns of its magnitudes,
whose integer order is numbers < Inf < NaN: Triton's maximum of floats drops NaN.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from . import interpreted

INTERPRETED = tl.constexpr(interpreted())
SMALLEST = tl.constexpr(2.0**-126)  # scales are normal numbers or 0
INFINITY_BITS = tl.constexpr(0x7F800000)
MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds |v| <= 2^22 half to even, into the lower bits
MAGIC_BITS = tl.constexpr(0x4B400000)
BEYOND = tl.constexpr(2.0**40)  # no int32 zero point brings a value back from there


class Range(NamedTuple):
    """What a group's scale depends on, each [B]."""

    magnitude: tl.tensor  # of the largest value, as bits
    low: tl.tensor
    high: tl.tensor


class Grid(NamedTuple):
    """Codes are clamp(round(x / scale) + zero_point); all are 0 where the scale is 0, Inf, NaN or negative."""

    scale: tl.tensor
    zero_point: tl.tensor  # int32; not read if symmetric


# ---- number formats --------------------------------------------------------------------------------------------------


@triton.jit
def widened(x):
    """x in float32. (The interpreter gets subnormal bfloat16 wrong.)"""
    if INTERPRETED and x.dtype == tl.bfloat16:
        x = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def rounded(x, like: tl.constexpr):
    """The float32 x rounded half to even to the type ``like``, and still float32."""
    if like == tl.bfloat16:
        if INTERPRETED:  # whose conversion cuts off
            bits = x.to(tl.int32, bitcast=True)
            bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000)
            x = (bits & -65536).to(tl.float32, bitcast=True)
        else:
            x = x.to(tl.bfloat16).to(tl.float32)
    elif like == tl.float16:
        x = x.to(tl.float16).to(tl.float32)
    return x


@triton.jit
def store_rounded(to, x, mask):
    """Stores the float32 x in the pointer's own type."""
    tl.store(to, rounded(x, to.dtype.element_ty).to(to.dtype.element_ty), mask=mask)


@triton.jit
def nearest(v):
    """The int32 next to v, |v| <= 2^22, half to even."""
    return (v + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS


# ---- the grid --------------------------------------------------------------------------------------------------------


@triton.jit
def survey(x):
    """The Range of every group of x [B, L]."""
    magnitude = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    return Range(magnitude, tl.min(x, axis=1), tl.max(x, axis=1))


@triton.jit
def wider(a, b):
    """The Range of two parts of a group."""
    return Range(tl.maximum(a.magnitude, b.magnitude), tl.minimum(a.low, b.low), tl.maximum(a.high, b.high))


@triton.jit
def usable(scale):
    return (scale > 0.0) & (scale < float("inf"))


@triton.jit
def grid_of(range_, SYMMETRIC: tl.constexpr):
    zero_point = range_.magnitude * 0
    if SYMMETRIC:
        magnitude = range_.magnitude.to(tl.float32, bitcast=True)
        scale = tl.div_rn(magnitude, tl.full(magnitude.shape, 127.0, tl.float32))
        scale = tl.where(magnitude < 127 * SMALLEST, 0.0, scale)
    else:  # the range is widened to contain 0: a constant group keeps its value, and 0 its exact code
        low, high = tl.minimum(range_.low, 0.0), tl.maximum(range_.high, 0.0)
        steps = tl.full(low.shape, 255.0, tl.float32)
        scale = tl.div_rn(high, steps) - tl.div_rn(low, steps)
        scale = tl.where(scale < SMALLEST, 0.0, scale)
        scale = tl.where(range_.magnitude > INFINITY_BITS, float("nan"), scale)
        good = usable(scale)
        zero_point = tl.where(good, nearest(-128.0 - tl.div_rn(low, tl.where(good, scale, 1.0))), 0)
    return Grid(scale, zero_point)


@triton.jit
def codes_of(x, grid, u, SYMMETRIC: tl.constexpr, STATIC: tl.constexpr, RANDOM: tl.constexpr):
    """int8 codes of x [B, L]. STATIC: the grid is not made for x, so that x / scale can be anything, NaN too, and the
    zero point any int32. RANDOM: rounds to floor(v) + (u < v - floor(v)); else half to even."""
    good = usable(grid.scale)
    v = tl.div_rn(x, tl.broadcast_to(tl.where(good, grid.scale, 1.0)[:, None], x.shape))
    good = good[:, None]
    WIDE: tl.constexpr = STATIC and not SYMMETRIC
    if WIDE:
        v = tl.minimum(tl.maximum(v, -BEYOND), BEYOND)
    else:  # within the bounds the clamped code is the same
        v = tl.minimum(tl.maximum(v, -256.0), 256.0)
    if RANDOM or WIDE:
        code = v.to(tl.int64) if WIDE else v.to(tl.int32)
        code -= (code.to(tl.float32) > v).to(tl.int32)  # the floor; tl.floor flushes subnormal numbers
        rest = v - code.to(tl.float32)
        if RANDOM:
            code += (u < rest).to(tl.int32)
        else:
            code += ((rest > 0.5) | ((rest == 0.5) & ((code & 1) != 0))).to(tl.int32)
    else:
        code = nearest(v)
    if SYMMETRIC:
        code = tl.minimum(tl.maximum(code, -127), 127)
    else:
        code = tl.minimum(tl.maximum(code + grid.zero_point[:, None], -128), 127)
    if STATIC:
        good = good & (x == x)
    return tl.where(good, code, 0).to(tl.int8)
