"""rms_norm and layer_norm, plain and quantising (reference/norms.py is the specification).

A program holds B whole rows in registers and reads them once. Longer rows are read again for each step. The quantising
form is the plain one with its values turned into codes before they are stored, where the groups are the row or a power
of two; others are cut differently from rows (tiles.py), so that they take a second launch.
"""

import struct

import triton
import triton.language as tl

from .codes import codes_of, grid_of, rounded, store_rounded, survey, widened
from .launch import launch, on_device
from .quantize import quantize
from .tiles import LONGEST, rows_of, tile


@triton.jit
def sum_in_order(x, B: tl.constexpr, L: tl.constexpr):
    """The sums [B, 1] of a float64 tile [B, L], pairwise: tl.sum adds in an order that depends on how a compiled kernel
    spreads the tile over its threads, so on alignments and on what is stored; then plain and fused could differ."""
    for _ in tl.static_range(L.bit_length() - 1):
        x = tl.sum(tl.reshape(x, [B, x.shape[1] // 2, 2]), axis=2)
    return x


@triton.jit
def _sum_of(x, residual, at, inside):
    """x + residual rounded to x's type, in float32."""
    h = widened(tl.load(x + at, mask=inside, other=0.0))
    if residual is not None:
        h = rounded(h + widened(tl.load(residual + at, mask=inside, other=0.0)), x.dtype.element_ty)
    return h


@triton.jit
def _normed(h, mean, inverse, weight, bias, at, inside, like: tl.constexpr, CENTRED: tl.constexpr):
    if CENTRED:
        h = h - mean.to(tl.float32)
    y = rounded(h * inverse, like)
    y = rounded(y * widened(tl.load(weight + at, mask=inside, other=0.0)), like)
    if bias is not None:
        y = rounded(y + widened(tl.load(bias + at, mask=inside, other=0.0)), like)
    return y


@triton.jit(do_not_specialize=["rows", "eps"])
def norm_kernel(
    x, x_stride, residual, residual_stride, residual_out, residual_out_stride, weight, bias, eps,
    out, out_stride, scale, scale_stride, sums, sums_stride, rows, cols,
    CENTRED: tl.constexpr, GROUP: tl.constexpr, LONG: tl.constexpr, B: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """GROUP: values per scale (L for the whole row), 0 for the plain operation. ``eps``: the bits of a float64."""
    row = tl.program_id(0).to(rows.dtype) * B + tl.arange(0, B)[:, None]
    real = row < rows
    row = row.to(tl.int64)
    x += row * x_stride
    out += row * out_stride
    if residual is not None:
        residual += row * residual_stride
        residual_out += row * residual_out_stride
    place = tl.arange(0, L)[None, :]
    inside = real & (place < cols)
    count = cols.to(tl.float64)
    like: tl.constexpr = x.dtype.element_ty

    mean = tl.zeros([B, 1], tl.float64)
    if LONG:
        squares = tl.zeros([B, 1], tl.float64)
        if CENTRED:
            for at in range(0, cols, L):
                h = _sum_of(x, residual, at + place, real & (at + place < cols))
                mean += sum_in_order(h.to(tl.float64), B, L)
            mean = mean / count
        for at in range(0, cols, L):
            there = real & (at + place < cols)
            d = _sum_of(x, residual, at + place, there).to(tl.float64) - mean
            squares += sum_in_order(tl.where(there, d * d, 0.0), B, L)
    else:
        h = _sum_of(x, residual, place, inside)
        d = h.to(tl.float64)
        if CENTRED:
            mean = sum_in_order(d, B, L) / count
            d = tl.where(inside, d - mean, 0.0)
        squares = sum_in_order(d * d, B, L)
    eps = eps.to(tl.int64).to(tl.float64, bitcast=True)
    inverse = (1.0 / tl.sqrt(squares / count + eps)).to(tl.float32)

    if LONG:
        for at in range(0, cols, L):
            there = real & (at + place < cols)
            h = _sum_of(x, residual, at + place, there)
            if residual is not None:
                tl.debug_barrier()
                store_rounded(residual_out + at + place, h, there)
            y = _normed(h, mean, inverse, weight, bias, at + place, there, like, CENTRED)
            store_rounded(out + at + place, y, there)
    else:
        if residual is not None:
            tl.debug_barrier()  # residual_out may be x or residual, whose values other threads may hold as well
            store_rounded(residual_out + place, h, inside)
        y = _normed(h, mean, inverse, weight, bias, place, inside, like, CENTRED)
        if GROUP == 0:
            store_rounded(out + place, y, inside)
        else:
            PARTS: tl.constexpr = L // GROUP
            y = tl.reshape(tl.where(inside, y, 0.0), [B * PARTS, GROUP])
            grid = grid_of(survey(y), True)
            codes = codes_of(y, grid, 0.0, True, False, False)
            tl.store(out + place, tl.reshape(codes, [B, L]), mask=inside)
            unit = tl.arange(0, B * PARTS)
            row = tl.program_id(0).to(rows.dtype) * B + unit // PARTS
            g = unit % PARTS
            kept = (row < rows) & (g * GROUP < cols)
            tl.store(scale + row.to(tl.int64) * scale_stride + g, grid.scale, mask=kept)
            if sums is not None:
                total = tl.sum(codes.to(tl.int32), axis=1)
                tl.store(sums + row.to(tl.int64) * sums_stride + g, total, mask=kept)


def _norm(x, weight, bias, eps, residual, residual_out, centred, out, group=0, scale=None, sums=None):
    if out.numel() == 0:
        return
    rows, stride = rows_of(x)
    cols = x.shape[-1]
    together, long, threads = tile(cols)
    added = (None, 0, None, 0)
    if residual is not None:
        added = residual, rows_of(residual)[1], residual_out, rows_of(residual_out)[1]
    with on_device(x):
        launch(
            norm_kernel, (triton.cdiv(rows, together),), threads,
            x, stride, *added, weight, bias, struct.unpack("q", struct.pack("d", eps))[0],
            out, rows_of(out)[1], scale, 0 if scale is None else rows_of(scale)[1],
            sums, 0 if sums is None else rows_of(sums)[1], rows, cols,
            CENTRED=centred, GROUP=long if group == cols else group, LONG=cols > long, B=together, L=long,
        )  # fmt: skip


def _norm_quantize(x, weight, bias, eps, residual, residual_out, centred, group, q, scale, sums):
    if x.shape[-1] > LONGEST or (group != x.shape[-1] and group & (group - 1)):
        y = x.new_empty(x.shape)
        _norm(x, weight, bias, eps, residual, residual_out, centred, y)
        quantize("plain", y, group, True, False, None, 0, q, scale, None, sums)
    elif x.shape[-1] == 0:
        quantize("plain", x, group, True, False, None, 0, q, scale, None, sums)
    else:
        _norm(x, weight, bias, eps, residual, residual_out, centred, q, group, scale, sums)


def rms_norm(x, weight, eps, residual, residual_out, out):
    _norm(x, weight, None, eps, residual, residual_out, False, out)


def layer_norm(x, weight, bias, eps, residual, residual_out, out):
    _norm(x, weight, bias, eps, residual, residual_out, True, out)


def rms_norm_quantize_int8(x, weight, eps, residual, residual_out, group, q, scale, sums):
    _norm_quantize(x, weight, None, eps, residual, residual_out, False, group, q, scale, sums)


def layer_norm_quantize_int8(x, weight, bias, eps, residual, residual_out, group, q, scale, sums):
    _norm_quantize(x, weight, bias, eps, residual, residual_out, True, group, q, scale, sums)
