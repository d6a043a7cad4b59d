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
from .codes import Grid, Range, codes_of, grid_of, store_rounded, survey, widened, wider
from .launch import launch, on_device, target
from .quantize import quantize_int8
from .rotation import rotate_quantize_kernel, rotated
from .tiles import tile

PANEL = tl.constexpr(16)
LONGEST = 256  # values of a turn of the loop: 4 KiB of weights
PROLOGUE = 8192  # values of x that every program may quantise
SHORTEST = 4  # turns that are worth a program of their own


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
    """Programs (ROWS rows, panel, part of the turns). LONG: the S slices of a turn are parts of one group. STAGES as in
    rotation.py. x is handled as S * ROWS units of K values: slice by slice, all rows of a slice."""
    panel = tl.program_id(1).to(tl.int64)
    base = tl.program_id(0) * ROWS
    unit, slot, at = tl.arange(0, S * ROWS), tl.arange(0, S), tl.arange(0, K)[None, :]
    row, lane = base + tl.arange(0, ROWS), tl.arange(0, PANEL)
    row_of, slot_of = base + unit % ROWS, unit // ROWS
    real = (row_of < rows)[:, None]
    x += (row_of.to(tl.int64) * x_stride)[:, None]
    codes += panel * groups * steps * 64
    w_scale += panel * groups * PANEL
    y = tl.zeros([ROWS, PANEL], tl.float32)
    if LONG:
        begin = tl.program_id(2) * turns * (S * K)
        end = tl.minimum(begin + turns * (S * K), group)
        s_x = tl.zeros([ROWS], tl.float32)
        if x_scale is None:  # one scale per row
            range_ = survey(tl.zeros([S * ROWS, K], tl.float32))
            for first in range(0, group, S * K):
                k = first + (slot_of * K)[:, None] + at
                range_ = wider(range_, survey(widened(tl.load(x + k, mask=(k < group) & real, other=0.0))))
            largest = tl.max(tl.reshape(range_.magnitude, [S, ROWS]), axis=0)
            s_x = grid_of(Range(largest, range_.low, range_.high), True).scale
            s_unit = tl.reshape(tl.broadcast_to(s_x[None, :], [S, ROWS]), [S * ROWS])
            if part_scale is not None:
                tl.store(part_scale + row, s_x, mask=(row < rows) & (panel + tl.program_id(2) == 0))
        for g in range(groups):
            acc = tl.zeros([S, ROWS, PANEL], tl.int32)
            for first in range(begin, end, S * K):
                k = first + (slot_of * K)[:, None] + at
                v = tl.load(x + g * group + k, mask=(k < end) & real, other=0)
                if x_scale is None:
                    v = codes_of(widened(v), Grid(s_unit, 0), 0, True, False, False)
                step = first // 4 + slot[:, None] * (K // 4)
                w = weights(codes + g * steps * 64, step, tl.full([S, 1], 0, tl.int32) + (end + 3) // 4, S, K)
                acc += product(tl.reshape(v, [S, ROWS, K]), w, INT8)
            whole = tl.sum(acc, axis=0)
            if parts is None:
                if x_scale is not None:
                    of_row = x_scale + row.to(tl.int64) * scale_stride + g * scale_step
                    s_x = tl.load(of_row, mask=row < rows, other=0.0)
                s_w = tl.load(w_scale + g * PANEL + lane)
                y += whole.to(tl.float32) * (s_x[:, None] * s_w[None, :])
            else:
                channel = panel * PANEL + lane[None, :]
                to = parts + (tl.program_id(2).to(tl.int64) * rows + row[:, None]) * n + channel
                tl.store(to, whole, mask=(row < rows)[:, None] & (channel < n))
    else:
        for turn in range(turns):
            g, g_of = turn * S + slot, turn * S + slot_of
            v = tl.load(x + (g_of * group)[:, None] + at, mask=(at < group) & (g_of < groups)[:, None] & real, other=0)
            if x_scale is None:
                v = widened(v)
                if STAGES > 0:
                    v = rotated(v, S * ROWS, K, STAGES)
                grid = grid_of(survey(v), True)
                s_x = grid.scale
                v = codes_of(v, grid, 0, True, False, False)
            else:
                of_row = x_scale + row_of.to(tl.int64) * scale_stride + g_of * scale_step
                s_x = tl.load(of_row, mask=(row_of < rows) & (g_of < groups), other=0.0)
            here = (g < groups)[:, None]
            begin = tl.where(here, g[:, None] * steps, 0)
            w = weights(codes, begin, tl.where(here, begin + steps, 0), S, K)
            s_w = tl.load(w_scale + g[:, None] * PANEL + lane[None, :], mask=here, other=0.0)
            acc = product(tl.reshape(v, [S, ROWS, K]), w, INT8)
            s = tl.reshape(s_x, [S, ROWS])[:, :, None] * s_w[:, None, :]
            y = add_in_order(y, acc.to(tl.float32) * s, S, ROWS)
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
    rotate = weight.rotated  # which only float rows can meet
    long = group > LONGEST
    int8 = interpreted() or int8_dots(target())
    together = rows_together(rows, int8)
    with on_device(x):
        if scale is None and (together * k > PROLOGUE or (long and (groups > 1 or rotate))):
            x, scale = quantized(x, group, rotate)
            rotate = False
        width = 64 if long else max(32, triton.next_power_of_2(group))
        slices = 4 if long else min(4, LONGEST // width, triton.next_power_of_2(groups))
        turns = triton.cdiv(group, slices * width) if long else triton.cdiv(groups, slices)
        tiles, panels, splits = triton.cdiv(rows, together), len(weight.codes), 1
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
            ROWS=together, S=slices, K=width, LONG=long, STAGES=group.bit_length() - 1 if rotate else 0,
            INT8=int8,
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
    groups = k // group
    q, scale = x.new_empty((rows, k), dtype=torch.int8), x.new_empty((rows, groups), dtype=torch.float32)
    if not rotate:
        quantize_int8(x, group, True, False, None, 0, q, scale, None, None)
        return q, scale
    together, long, threads = tile(group)
    if group > long:
        raise Unsupported(f"rotation in groups of {group}")
    launch(
        rotate_quantize_kernel, (triton.cdiv(rows * groups, together),), threads,
        x, x.stride(0), q, scale, rows * groups, groups, B=together, L=long, STAGES=group.bit_length() - 1,
    )  # fmt: skip
    return q, scale


def rows_together(rows, int8):
    """Rows of a program: few sizes, so that few kernels are compiled; 32 is what the registers hold with int8 dots."""
    return 1 if rows == 1 else 4 if rows <= 4 else 16 if rows <= 16 or not int8 else 32


def int8_dots(target):
    """Whether Triton multiplies int8 matrices on a target."""
    return target.backend != "cuda" or target.arch >= 80


@functools.cache
def _processors(device):
    return torch.cuda.get_device_properties(device).multi_processor_count


def programs(x):
    """How many programs a device needs before the split of K ends: two per multiprocessor."""
    return 2 * _processors(x.device) if x.is_cuda else 1
