"""quantize_int8 and dequantize_int8. One pass over units that fit a program's registers, two over longer ones.

The quantise kernel takes its values from x, or makes them of a gate and an up projection (gates.py): so the fused
operation cannot differ from the plain one followed by this one.
"""

import triton
import triton.language as tl

from ..code_outputs import group_count
from .activations import activated
from .codes import Grid, Range, codes_of, grid_of, store_rounded, survey, widened, wider
from .launch import launch, on_device
from .philox import ROUND, words
from .tiles import per_unit, rows_of, tile, units_of


@triton.jit
def values_of(x, at, inside, cols, SOURCE: tl.constexpr):
    """The values at ``at`` in float32, 0 where not ``inside``; gated: the gate's place, ``cols`` before up's."""
    if SOURCE == "plain":
        return widened(tl.load(x + at, mask=inside, other=0.0))
    else:
        gate = widened(tl.load(x + at, mask=inside, other=0.0))
        up = widened(tl.load(x + at + cols, mask=inside, other=0.0))
        return activated(gate, up, x.dtype.element_ty, SOURCE)


@triton.jit
def noise(seed, first, B: tl.constexpr, L: tl.constexpr, ALIGNED: tl.constexpr):
    """u in [0, 1) with 24 bits for the elements ``first`` [B] ... of the whole. ALIGNED: multiples of 4, so that a
    Philox call serves four elements; else it is made for every element."""
    first = first[:, None]
    stream, zero = tl.full([1, 1], ROUND, tl.uint32), tl.full([1, 1], 0, tl.uint32)
    if ALIGNED:
        quad = (first.to(tl.uint64) >> 2) + tl.arange(0, L // 4)[None, :].to(tl.uint64)
        w0, w1, w2, w3 = words(seed, quad, stream, zero)
        w = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [B, L])
    else:
        i = (first + tl.arange(0, L)[None, :]).to(tl.uint64)
        w0, w1, w2, w3 = words(seed, i >> 2, stream, zero)
        lane = (i & 3).to(tl.int32)
        w = tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))
    return (w >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _write(v, q, inside, grid, seed, first, SYMMETRIC: tl.constexpr, STATIC: tl.constexpr, RANDOM: tl.constexpr,
           ALIGNED: tl.constexpr):  # fmt: skip
    """Stores the codes of a tile and returns their sums [B]."""
    u = noise(seed, first, v.shape[0], v.shape[1], ALIGNED) if RANDOM else 0.0
    codes = tl.where(inside, codes_of(v, grid, u, SYMMETRIC, STATIC, RANDOM), 0)
    tl.store(q, codes, mask=inside)
    return tl.sum(codes.to(tl.int32), axis=1)


@triton.jit(do_not_specialize=["units", "seed", "offset"])
def quantize_kernel(
    x, x_stride, q, q_stride, scale, scale_stride, scale_step, zero_point, zero_stride, zero_step, sums, sums_stride,
    units, groups, group, seed, offset,
    SOURCE: tl.constexpr, SYMMETRIC: tl.constexpr, STATIC: tl.constexpr, RANDOM: tl.constexpr, ALIGNED: tl.constexpr,
    LONG: tl.constexpr, B: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    u, row, g = units_of(units, groups, B)
    cols = groups * group
    row = row.to(tl.int64)
    x += (row * x_stride + g * group)[:, None]
    q += (row * q_stride + g * group)[:, None]
    place = tl.arange(0, L)[None, :]
    first = offset + u.to(tl.int64) * group
    seed = seed.to(tl.int64)
    real = u < units
    inside = real[:, None] & (place < group)
    if LONG:
        v = tl.zeros([B, L], tl.float32)
    else:
        v = values_of(x, place, inside, cols, SOURCE)

    scales = scale + row * scale_stride + g * scale_step
    if zero_point is not None:
        zero_points = zero_point + row * zero_stride + g * zero_step
    if STATIC:
        s = tl.load(scales, mask=real, other=0.0)
        grid = Grid(s, (s * 0.0).to(tl.int32) if SYMMETRIC else tl.load(zero_points, mask=real, other=0))
    else:
        if LONG:
            magnitude, low, high = tl.zeros([B], tl.int32), tl.zeros([B], tl.float32), tl.zeros([B], tl.float32)
            for at in range(0, group, L):
                there = real[:, None] & (at + place < group)
                part = survey(values_of(x, at + place, there, cols, SOURCE))
                magnitude, low, high = wider(Range(magnitude, low, high), part)
            range_ = Range(magnitude, low, high)
        else:
            range_ = survey(v)
        grid = grid_of(range_, SYMMETRIC)
        tl.store(scales, grid.scale, mask=real)
        if not SYMMETRIC:
            tl.store(zero_points, grid.zero_point, mask=real)

    if LONG:
        total = tl.zeros([B], tl.int32)
        for at in range(0, group, L):
            there = real[:, None] & (at + place < group)
            v = values_of(x, at + place, there, cols, SOURCE)
            total += _write(v, q + at + place, there, grid, seed, first + at, SYMMETRIC, STATIC, RANDOM, ALIGNED)
    else:
        total = _write(v, q + place, inside, grid, seed, first, SYMMETRIC, STATIC, RANDOM, ALIGNED)
    if sums is not None:
        tl.store(sums + row * sums_stride + g, total, mask=real)


@triton.jit(do_not_specialize=["units"])
def dequantize_kernel(
    q, q_stride, scale, scale_stride, scale_step, zero_point, zero_stride, zero_step, out, out_stride,
    units, groups, group, B: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Programs (B units, L of their values)."""
    u, row, g = units_of(units, groups, B)
    row = row.to(tl.int64)
    place = tl.program_id(1) * L + tl.arange(0, L)[None, :]
    real = u < units
    inside = real[:, None] & (place < group)
    s = tl.load(scale + row * scale_stride + g * scale_step, mask=real, other=0.0)
    code = tl.load(q + (row * q_stride + g * group)[:, None] + place, mask=inside, other=0)
    if zero_point is None:
        steps = code.to(tl.float32)
    else:
        zero = tl.load(zero_point + row * zero_stride + g * zero_step, mask=real, other=0)
        steps = (code.to(tl.int64) - zero[:, None]).to(tl.float32)
    store_rounded(out + (row * out_stride + g * group)[:, None] + place, steps * s[:, None], inside)


def quantize(source, x, group, symmetric, static, seed, offset, q, scale, zero_point, sums):
    if q.shape[-1] == 0:  # a row of no values still has a scale
        for value in (sums,) if static else (scale, zero_point, sums):
            if value is not None:
                value.zero_()
        return
    if q.numel() == 0:
        return
    rows, stride = rows_of(q)
    groups = q.shape[-1] // group
    units = rows * groups
    together, long, threads = tile(group)
    random = seed is not None
    with on_device(x):
        launch(
            quantize_kernel, (triton.cdiv(units, together),), threads,
            x, rows_of(x)[1], q, stride, *per_unit(scale), *per_unit(zero_point),
            sums, 0 if sums is None else rows_of(sums)[1], units, groups, group,
            _signed(seed) if random else 0, _signed(offset),
            SOURCE=source, SYMMETRIC=symmetric, STATIC=static, RANDOM=random,
            ALIGNED=random and offset % 4 == 0 and group % 4 == 0, LONG=group > long, B=together, L=long,
        )  # fmt: skip


def _signed(number):
    """A number below 2^64 as the int64 of the same bits (larger offsets count modulo 2^64)."""
    number &= 0xFFFFFFFFFFFFFFFF
    return number - (number >> 63 << 64)


def quantize_int8(x, *args):
    quantize("plain", x, *args)


def dequantize_int8(q, scale, zero_point, out):
    if q.numel() == 0:
        return
    rows, stride = rows_of(q)
    groups, group = group_count(q.shape[-1], scale, zero_point)
    together, long, threads = tile(group, 1024)
    with on_device(q):
        launch(
            dequantize_kernel, (triton.cdiv(rows * groups, together), triton.cdiv(group, long)), threads,
            q, stride, *per_unit(scale), *per_unit(zero_point), out, rows_of(out)[1], rows * groups, groups, group,
            B=together, L=long,
        )  # fmt: skip
