"""linear_int8: y = x w^T with int8 codes and exact int32 sums within a scale group (reference/linear.py is the form).

A program computes one panel of 16 channels for up to ROWS rows. It reads the panel's bytes front to back, 16 to a
thread, with the loads of the next turns under way. The words of a turn, [S slices, K / 4 steps of 16], lose the offset
of 128 and become S operands [K, 16] of a batched int8 dot (mma .s8, MFMA or dot4 i8) by a reshape: four k of a channel
are a word of the layout and a register of the matrix unit. Rows that are not there are masked; the unit is idle either
way, so that 16 rows cost what 1 does.

Groups of at most LONGEST values: a slice is a group, S groups at a time; their products acc * (s_x * s_w) are added to
y one after the other. Longer groups: the slices are parts of one group, whose int32 sums may be added in any order. So
16 channels are the unit of work that keeps the f32 order, and as few as make a matrix operand: N = 4096 gives 256
programs with 16 KiB under way each. Where that is less than the device holds and there is one scale per row, K is split
as well; a second kernel adds up the int32 partial sums. (A split with several groups would have to keep one product per
group: 4 M / group bytes for each byte of the weights, and another launch.)

A program reads M values of x for every 16 bytes of weights. Few short rows it quantises itself, in the prologue; all
others are quantised by a launch before, or every panel would divide M K values anew.

Neither M nor the split changes the order of a sum: a row's bits are its own.
"""

import functools

import torch
import triton
import triton.language as tl

from ..registry import Unsupported
from . import interpreted
from .codes import store_rounded, widened
from .launch import launch, on_device, target

PANEL = tl.constexpr(16)
LONGEST = 256  # values of a turn of the loop: 4 KiB of weights
PROLOGUE = 8192  # values of x that every program may quantise
SHORTEST = 4  # turns that are worth a program of their own
WIDEST = 16384  # values of a group in the registers of a program
MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and taking it away rounds half to even
TINY = tl.constexpr(127 * 2.0**-126)  # rows below have scale 0


# ---- quantising ------------------------------------------------------------------------------------------------------


@triton.jit
def magnitudes(x):
    """|x| as integers of the same order, in which NaN is more than infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(largest):
    """The scale of a group from the largest of its magnitudes()."""
    largest = largest.to(tl.float32, bitcast=True)
    return tl.where(largest < TINY, 0.0, tl.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32)))


@triton.jit
def codes_of(x, scale):
    """int8 codes of x [..., K] with scales [..., 1]; 0 where a scale is 0, infinite or NaN."""
    usable = (scale > 0.0) & (scale < float("inf"))
    v = tl.div_rn(x, tl.broadcast_to(tl.where(usable, scale, 1.0), x.shape))
    v = tl.where(usable, (v + MAGIC) - MAGIC, 0.0)
    return tl.minimum(tl.maximum(v, -127.0), 127.0).to(tl.int8)


@triton.jit
def rotated(x, S: tl.constexpr, R: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr):
    """x [S, R, K], 2^STAGES values at a time times the Hadamard matrix / 2^STAGES, neighbours before distant ones."""
    for stage in tl.static_range(STAGES):
        pairs = tl.permute(tl.reshape(x, [S, R, K // (2 * 2**stage), 2, 2**stage]), (0, 1, 2, 4, 3))
        a, b = tl.split(pairs)
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 2, 4, 3)), [S, R, K])
    return x * (0.5**STAGES)


@triton.jit
def quantize_kernel(x, stride, q, scale, k, group, groups, S: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr):
    """Programs (row, S of its groups of K or more). STAGES > 0: x is rotated first, in groups of 2^STAGES."""
    row = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1) * S + tl.arange(0, S)[:, None, None]
    largest = tl.zeros([S, 1, 1], tl.int32)
    for first in range(0, group, K):
        at = first + tl.arange(0, K)[None, None, :]
        v = widened(tl.load(x + row * stride + g * group + at, mask=(at < group) & (g < groups), other=0.0))
        if STAGES > 0:
            v = rotated(v, S, 1, K, STAGES)
        largest = tl.maximum(largest, tl.max(magnitudes(v), axis=2, keep_dims=True))
    s = scale_of(largest)
    tl.store(scale + row * groups + g, s, mask=g < groups)
    for first in range(0, group, K):
        at = first + tl.arange(0, K)[None, None, :]
        mask = (at < group) & (g < groups)
        v = widened(tl.load(x + row * stride + g * group + at, mask=mask, other=0.0))
        if STAGES > 0:
            v = rotated(v, S, 1, K, STAGES)
        tl.store(q + row * k + g * group + at, codes_of(v, s), mask=mask)


# ---- the product -----------------------------------------------------------------------------------------------------


@triton.jit
def weights(panel, step, end, S: tl.constexpr, K: tl.constexpr):
    """int8 [S, K, 16]: K/4 steps of the panel per slice, from ``step`` [S, 1] on; anything beyond ``end`` [S, 1]."""
    word = tl.arange(0, 4 * K)[None, :]
    at = panel.to(tl.pointer_type(tl.int32)) + (step * 16).to(tl.int64) + word
    w = tl.load(at, mask=word < (end - step) * 16, other=0) ^ -2139062144  # 0x80808080: from code + 128 to code
    low = tl.join(w.to(tl.int8), (w >> 16).to(tl.int8))
    high = tl.join((w >> 8).to(tl.int8), (w >> 24).to(tl.int8))
    codes = tl.join(low, high)
    return tl.reshape(tl.permute(tl.reshape(codes, [S, K // 4, 16, 4]), (0, 1, 3, 2)), [S, K, 16])


@triton.jit
def product(x, w, INT8: tl.constexpr):
    """int32 sums of [S, R, K] codes times [S, K, 16]; without int8 dots (INT8) in f32, where at most 1024 are exact."""
    if INT8:
        return tl.dot(x, w, out_dtype=tl.int32)
    else:
        tl.static_assert(x.shape[2] <= 1024)
        return tl.dot(x.to(tl.float32), w.to(tl.float32), input_precision="ieee").to(tl.int32)


@triton.jit
def add_in_order(y, p, S: tl.constexpr, ROWS: tl.constexpr):
    """y [ROWS, 16] plus p[0], plus p[1], ... of p [S, ROWS, 16]."""
    if S == 1:
        y += tl.reshape(p, [ROWS, 16])
    elif S == 2:
        a, b = tl.split(tl.permute(p, (1, 2, 0)))
        y = (y + a) + b
    else:
        tl.static_assert(S == 4)
        even, odd = tl.split(tl.reshape(tl.permute(p, (1, 2, 0)), [ROWS, 16, 2, 2]))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        y = (((y + a) + b) + c) + d
    return y


@triton.jit
def finish(y, row, rows, channel, n, bias, out, out_stride):
    """Adds the bias to y [R, C] and stores it, for rows [R, 1] and channels [1, C]."""
    inside = (row < rows) & (channel < n)
    if bias is not None:
        y += widened(tl.load(bias + channel, mask=channel < n, other=0.0))
    store_rounded(out + row.to(tl.int64) * out_stride + channel, y, inside)


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    x, x_stride, x_scale, scale_stride, scale_step,  # x_scale None: x is float and quantised here
    codes, w_scale, bias, out, out_stride,
    parts, part_scale,  # instead of out: int32 partial sums [splits, rows, n]; where the scales of x go, or None
    rows, n, group, groups, steps, turns,  # steps of a group; turns of the loop of one program
    ROWS: tl.constexpr, S: tl.constexpr, K: tl.constexpr, LONG: tl.constexpr, STAGES: tl.constexpr,
    INT8: tl.constexpr,
):  # fmt: skip
    """Programs (ROWS rows, panel, part of the turns). LONG: the S slices of a turn are parts of one group; STAGES as
    in quantize_kernel."""
    panel = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, PANEL)
    slot = tl.arange(0, S)
    codes += panel * groups * steps * 64
    w_scale += panel * groups * PANEL
    x += row.to(tl.int64)[None, :, None] * x_stride
    at = tl.arange(0, K)[None, None, :]
    in_rows = row < rows
    y = tl.zeros([ROWS, PANEL], tl.float32)
    if LONG:
        begin = tl.program_id(2) * turns * (S * K)
        end = tl.minimum(begin + turns * (S * K), group)
        s_x = tl.zeros([ROWS], tl.float32)
        if x_scale is None:  # one scale per row
            largest = tl.zeros([ROWS], tl.int32)
            for first in range(0, group, S * K):
                k = first + slot[:, None, None] * K + at
                v = widened(tl.load(x + k, mask=(k < group) & in_rows[None, :, None], other=0.0))
                largest = tl.maximum(largest, tl.max(tl.max(magnitudes(v), axis=2), axis=0))
            s_x = scale_of(largest)
            if part_scale is not None:
                tl.store(part_scale + row, s_x, mask=in_rows & (panel + tl.program_id(2) == 0))
        for g in range(groups):
            acc = tl.zeros([S, ROWS, PANEL], tl.int32)
            for first in range(begin, end, S * K):
                k = first + slot[:, None, None] * K + at
                v = tl.load(x + g * group + k, mask=(k < end) & in_rows[None, :, None], other=0)
                if x_scale is None:
                    v = codes_of(widened(v), s_x[None, :, None])
                step = first // 4 + slot[:, None] * (K // 4)
                w = weights(codes + g * steps * 64, step, tl.full([S, 1], 0, tl.int32) + (end + 3) // 4, S, K)
                acc += product(v, w, INT8)
            whole = tl.sum(acc, axis=0)
            if parts is None:
                if x_scale is not None:
                    s_x = tl.load(x_scale + row.to(tl.int64) * scale_stride + g * scale_step, mask=in_rows, other=0.0)
                s_w = tl.load(w_scale + g * PANEL + lane)
                y += whole.to(tl.float32) * (s_x[:, None] * s_w[None, :])
            else:
                channel = panel * PANEL + lane[None, :]
                to = parts + (tl.program_id(2).to(tl.int64) * rows + row[:, None]) * n + channel
                tl.store(to, whole, mask=in_rows[:, None] & (channel < n))
    else:
        for turn in range(turns):
            g = turn * S + slot
            here = (at < group) & (g < groups)[:, None, None] & in_rows[None, :, None]
            v = tl.load(x + g[:, None, None] * group + at, mask=here, other=0)
            if x_scale is None:
                v = widened(v)
                if STAGES > 0:
                    v = rotated(v, S, ROWS, K, STAGES)
                s_x = scale_of(tl.max(magnitudes(v), axis=2))
                v = codes_of(v, s_x[:, :, None])
            else:
                of_row = x_scale + row.to(tl.int64)[None, :] * scale_stride + g[:, None] * scale_step
                s_x = tl.load(of_row, mask=(g < groups)[:, None] & in_rows[None, :], other=0.0)
            begin = tl.where(g < groups, g * steps, 0)[:, None]
            w = weights(codes, begin, begin + tl.where(g < groups, steps, 0)[:, None], S, K)
            s_w = tl.load(w_scale + g[:, None] * PANEL + lane[None, :], mask=(g < groups)[:, None], other=0.0)
            acc = product(v, w, INT8)
            y = add_in_order(y, acc.to(tl.float32) * (s_x[:, :, None] * s_w[:, None, :]), S, ROWS)
    if parts is None:
        finish(y, row[:, None], rows, panel * PANEL + lane[None, :], n, bias, out, out_stride)


@triton.jit(do_not_specialize=["rows"])
def sum_kernel(parts, splits, x_scale, scale_stride, w_scale, bias, out, out_stride, rows, n, C: tl.constexpr):
    """Programs (row, C channels): the partial sums of a matrix with one scale per row, scaled."""
    row = tl.program_id(0)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    acc = tl.zeros([C], tl.int32)
    for part in range(splits):
        acc += tl.load(parts + (part * rows + row).to(tl.int64) * n + channel, mask=channel < n, other=0)
    s_w = tl.load(w_scale + channel, mask=channel < n, other=0.0)
    y = acc.to(tl.float32) * (tl.load(x_scale + row.to(tl.int64) * scale_stride) * s_w)
    row = tl.full([1, 1], 0, tl.int32) + row
    finish((y + 0.0)[None, :], row, rows, channel[None, :], n, bias, out, out_stride)


# ---- the host's part -------------------------------------------------------------------------------------------------


def linear_int8(x, scale, weight, bias, out):
    rows, n = out.shape
    if rows == 0 or n == 0:
        return
    k, group, groups = weight.k, weight.group_size, weight.groups
    rotate = getattr(weight, "rotated", False) and scale is None
    long = group > LONGEST
    tile = 1 if rows == 1 else 4 if rows <= 4 else 16
    with on_device(x):
        if scale is None and (tile * k > PROLOGUE or (long and (groups > 1 or rotate))):
            x, scale = quantized(x, group, rotate)
            rotate = False
        width = 64 if long else max(32, triton.next_power_of_2(group))
        slices = 4 if long else min(4, LONGEST // width, triton.next_power_of_2(groups))
        turns = triton.cdiv(group, slices * width) if long else triton.cdiv(groups, slices)
        tiles, panels, splits = triton.cdiv(rows, tile), len(weight.codes), 1
        if long and groups == 1:
            splits = min(max(1, programs(x) // (tiles * panels)), triton.cdiv(turns, SHORTEST))
            turns = triton.cdiv(turns, splits)
            splits = triton.cdiv(group, turns * slices * width)
        parts = part_scale = None
        if splits > 1:
            parts = out.new_empty((splits, rows, n), dtype=torch.int32)
            if scale is None:
                part_scale = out.new_empty((rows, 1), dtype=torch.float32)
        of_scale = (None, 0, 0) if scale is None else (scale, scale.stride(0), int(scale.shape[1] > 1))
        launch(
            linear_kernel, (tiles, panels, splits), 128,
            x, x.stride(0), *of_scale, weight.codes, weight.scale, bias, out, out.stride(0), parts, part_scale,
            rows, n, group, groups, -(-group // 4), turns,
            ROWS=tile, S=slices, K=width, LONG=long, STAGES=group.bit_length() - 1 if rotate else 0,
            INT8=interpreted() or int8_dots(target()),
        )  # fmt: skip
        if splits > 1:
            scale = part_scale if scale is None else scale
            launch(
                sum_kernel, (rows, triton.cdiv(n, 256)), 128,
                parts, splits, scale, scale.stride(0), weight.scale, bias, out, out.stride(0), rows, n, C=256,
            )  # fmt: skip


def quantized(x, group, rotate):
    """(codes, scales) of the rows of x, rotated first if asked for."""
    rows, k = x.shape
    width = min(triton.next_power_of_2(group), WIDEST)
    if rotate and group > WIDEST:
        raise Unsupported(f"rotation in groups of {group}")
    slices = max(1, 1024 // width)
    groups = k // group
    q, scale = x.new_empty((rows, k), dtype=torch.int8), x.new_empty((rows, groups), dtype=torch.float32)
    launch(
        quantize_kernel, (rows, triton.cdiv(groups, slices)), 128 if width < 8192 else 512,
        x, x.stride(0), q, scale, k, group, groups, S=slices, K=width, STAGES=group.bit_length() - 1 if rotate else 0,
    )  # fmt: skip
    return q, scale


def int8_dots(target):
    """Whether Triton multiplies int8 matrices on a target."""
    return target.backend != "cuda" or target.arch >= 80


@functools.cache
def _processors(device):
    return torch.cuda.get_device_properties(device).multi_processor_count


def programs(x):
    """How many programs a device needs before the split of K ends: two per multiprocessor."""
    return 2 * _processors(x.device) if x.is_cuda else 1
