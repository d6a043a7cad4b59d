"""attend_int8: a few query rows per request against a paged cache (reference/attention.py is the form).

Flash-decoding (Dao et al. 2023): the keys are split into parts of PART at fixed positions. A program takes one part of
one kv head for up to 16 query rows (rows of the request times the query heads that share the kv head; 16 is what a
matrix unit wants) and keeps the running maximum, sum and weighted values of an online softmax over tiles of TILE keys.
A second kernel combines the parts in ascending order. Positions, not lengths, decide what is added when, and keys that
a row doesn't see change nothing by a bit (their weight is 0, the factor of what came before is 1): so a row's bits
depend neither on R nor on B, nor on the keys behind it.

int8 caches: codes are exact in 16 bits, so that the scales stay outside of both products: key scales multiply scores,
value scales weights. Products of 16-bit rows run on the matrix units with float32 sums; a weight goes in as the sum of
two 16-bit numbers, as good as 17 bits. With float32 rows or caches, or mixed 16-bit types, products are float32.

Lengths and pages are device values: what is bad is looked at before it forms an address, and the output of its request
becomes NaN. Values that are NaN or infinite reach only the rows that see their key.
"""

import torch
import triton
import triton.language as tl

from . import interpreted
from .codes import rounded, store_rounded, widened
from .launch import launch, on_device, padded, target
from .linear import int8_dots

ROWS = tl.constexpr(16)
PART = tl.constexpr(256)
BITS = tl.constexpr("bits")


@triton.jit
def sum_in_pairs(x, A: tl.constexpr, L: tl.constexpr, C: tl.constexpr):
    """The sums [A, C] of x [A, L, C], pairwise: the order of tl.sum depends on how a compiled kernel spreads its tile
    over threads, so on alignments and on whether there is a mask."""
    for _ in tl.static_range(L.bit_length() - 1):
        x = tl.sum(tl.reshape(x, [A, x.shape[1] // 2, 2, C]), axis=2)
    return tl.sum(x, axis=1)  # of one


@triton.jit
def add_product(acc, a, b, HALF: tl.constexpr):
    """acc + a b with float32 sums. HALF: a 16-bit type that holds every value of both exactly (BITS: bfloat16, cut off,
    where conversions are slow); else how float32 is multiplied, None where there is no such product."""
    if HALF is None:
        products = a[:, :, None] * b[None, :, :]
        return acc + sum_in_pairs(products, a.shape[0], a.shape[1], b.shape[1])
    elif HALF == "ieee" or HALF == "tf32x3":
        return tl.dot(a, b, acc, input_precision=HALF)
    elif HALF == BITS:
        return tl.dot(_cut(a), _cut(b), acc)
    else:
        return tl.dot(a.to(HALF), b.to(HALF), acc)


@triton.jit
def _cut(x):
    return (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def add_weighted(acc, p, v, LIKE: tl.constexpr, HALF: tl.constexpr):
    """acc + p v, where p is float32 and v exact in the 16-bit type LIKE, if any."""
    if LIKE is None:
        return add_product(acc, p, v, HALF)
    else:
        high = rounded(p, LIKE)
        return add_product(add_product(acc, high, v, HALF), rounded(p - high, LIKE), v, HALF)


@triton.jit(do_not_specialize=["rows", "width", "parts"])
def attend_kernel(
    q, q_batch, q_row,
    k_cache, k_page, k_slot, k_head, k_scale, ks_page, ks_slot, ks_head,
    v_cache, v_page, v_slot, v_head, v_scale, vs_page, vs_slot, vs_head,
    page_table, width, lengths, mask, scale, out, values, sums,
    rows, sharing, kv_heads, page_size, pages, parts,
    D: tl.constexpr, DV: tl.constexpr, WIDE: tl.constexpr, WIDE_V: tl.constexpr,
    HALF: tl.constexpr, HALF_V: tl.constexpr, LIKE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Programs (16 rows of a request's kv head, part). Leaves the part's weighted values in ``values`` [B * H_kv,
    rows * sharing, parts, DV] and the maximum and sum of its weights in ``sums`` [..., 2]; without these, the only
    part's result in ``out``."""
    tiles = tl.cdiv(rows * sharing, ROWS)
    head, part = tl.program_id(0) // tiles, tl.program_id(1)
    i = (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)
    b, kv_head = (head // kv_heads).to(tl.int64), head % kv_heads
    length = tl.load(lengths + b)
    first = part * PART
    if first < length or sums is None:
        r = i // sharing
        here = i < rows * sharing
        at, at_v = tl.arange(0, WIDE)[None, :], tl.arange(0, WIDE_V)[None, :]
        row = b * q_batch + r.to(tl.int64) * q_row + (kv_head * sharing + i % sharing) * D
        queries = widened(tl.load(q + row[:, None] + at, mask=here[:, None] & (at < D), other=0.0))
        k_cache += kv_head.to(tl.int64) * k_head
        v_cache += kv_head.to(tl.int64) * v_head
        own = length - rows
        bad = ((length < rows) | (length > width * page_size)).to(tl.int32)
        end = tl.where(bad > 0, 0, tl.minimum(length, first + PART))
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, WIDE_V], tl.float32)
        for start in range(first, end, TILE):
            n = start + tl.arange(0, TILE)
            inside = n < end
            page = tl.load(page_table + b * width + n // page_size, mask=inside, other=0)
            good = (page >= 0) & (page < pages)
            bad = tl.maximum(bad, 1 - tl.min(good.to(tl.int32), axis=0))
            page, slot = tl.where(good, page, 0).to(tl.int64), (n % page_size).to(tl.int64)
            seen = (n[None, :] <= own + r[:, None]) & inside[None, :] & here[:, None]
            if mask is not None:
                mine = (n >= own) & inside
                marks = mask + (b * rows + r[:, None]) * rows + (n - own)[None, :]
                marked = tl.load(marks, mask=mine[None, :] & here[:, None], other=0) != 0
                seen = ((n < own)[None, :] & here[:, None]) | marked
            keys = tl.load(k_cache + (page * k_page + slot * k_slot)[:, None] + at,
                           mask=inside[:, None] & (at < D), other=0)  # fmt: skip
            s = add_product(tl.zeros([ROWS, TILE], tl.float32), queries, tl.trans(widened(keys)), HALF)
            if k_scale is not None:
                s *= tl.load(k_scale + page * ks_page + slot * ks_slot + kv_head * ks_head, mask=inside, other=0.0)[
                    None, :
                ]
            s = tl.where(seen, s * scale, float("-inf"))
            before = top
            top = tl.maximum(before, tl.max(s, axis=1))
            base = tl.where(top == float("-inf"), 0.0, top)
            p = tl.exp(s - base[:, None])
            fade = tl.exp(before - base)
            total = total * fade + tl.sum(sum_in_pairs(p[:, :, None], ROWS, TILE, 1), axis=1)
            acc *= fade[:, None]
            v = widened(tl.load(v_cache + (page * v_page + slot * v_slot)[:, None] + at_v,
                                mask=inside[:, None] & (at_v < DV), other=0))  # fmt: skip
            if v_scale is not None:
                of_v = tl.load(v_scale + page * vs_page + slot * vs_slot + kv_head * vs_head, mask=inside, other=0.0)
                acc = add_weighted(acc, tl.where(seen, p * of_v[None, :], 0.0), v, LIKE, HALF_V)
            else:
                finite = v - v == 0.0
                acc = add_weighted(acc, p, tl.where(finite, v, 0.0), LIKE, HALF_V)
                if tl.min(tl.min(finite.to(tl.int32), axis=1), axis=0) == 0:
                    none = tl.zeros([ROWS, WIDE_V], tl.float32)
                    reached = add_product(none, seen.to(tl.float32), tl.where(finite, 0.0, 1.0), HALF_V)
                    acc = tl.where(reached > 0.0, float("nan"), acc)
        total = tl.where(bad > 0, float("nan"), total)
        if sums is None:
            to = out + ((b * rows + r) * kv_heads * sharing + kv_head * sharing + i % sharing)[:, None] * DV + at_v
            finish(to, acc, total[:, None], here[:, None] & (at_v < DV))
        else:
            to = (head.to(tl.int64) * rows * sharing + i) * parts + part
            tl.store(values + to[:, None] * DV + at_v, acc, mask=here[:, None] & (at_v < DV))
            tl.store(sums + to * 2, top, mask=here)
            tl.store(sums + to * 2 + 1, total, mask=here)


@triton.jit
def finish(to, acc, total, mask):
    """The quotient, NaN for a row that sees no key."""
    total = tl.broadcast_to(tl.where(total == 0.0, float("nan"), total), acc.shape)
    store_rounded(to, tl.div_rn(acc, total), mask)


@triton.jit(do_not_specialize=["rows", "width", "parts"])
def combine_kernel(
    values, sums, lengths, width, out, rows, sharing, kv_heads, page_size, parts,
    DV: tl.constexpr, WIDE_V: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """One program per query row and head: adds its parts up, TOGETHER at a time."""
    index = tl.program_id(0)
    head, i = index // (rows * sharing), index % (rows * sharing)
    b, kv_head = (head // kv_heads).to(tl.int64), head % kv_heads
    length = tl.load(lengths + b)
    bad = (length < rows) | (length > width * page_size)
    used = tl.where(bad, 0, tl.cdiv(length, PART))
    at = tl.arange(0, WIDE_V)[None, :]
    sums += index.to(tl.int64) * parts * 2
    values += index.to(tl.int64) * parts * DV
    top = tl.full([], float("-inf"), tl.float32)
    for first in range(0, used, 64):
        part = first + tl.arange(0, 64)
        top = tl.maximum(top, tl.max(tl.load(sums + part * 2, mask=part < used, other=float("-inf")), axis=0))
    base = tl.where(top == float("-inf"), 0.0, top)
    acc = tl.zeros([1, WIDE_V], tl.float32)
    total = tl.zeros([1, 1], tl.float32)
    for first in range(0, used, TOGETHER):
        part = first + tl.arange(0, TOGETHER)
        weight = tl.exp(tl.load(sums + part * 2, mask=part < used, other=float("-inf")) - base)
        of_part = weight * tl.load(sums + part * 2 + 1, mask=part < used, other=0.0)
        total += sum_in_pairs(of_part[None, :, None], 1, TOGETHER, 1)
        mask = (part < used)[:, None] & (at < DV)
        of_part = weight[:, None] * tl.load(values + part[:, None] * DV + at, mask=mask, other=0.0)
        acc += sum_in_pairs(of_part[None, :, :], 1, TOGETHER, WIDE_V)
    total = tl.where(bad, float("nan"), total)
    to = out + ((b * rows + i // sharing) * kv_heads * sharing + kv_head * sharing + i % sharing) * DV + at
    finish(to, acc, total, at < DV)


def attend_int8(q, k_cache, k_scale, v_cache, v_scale, page_table, lengths, mask, scale, out):
    batch, rows, heads, dim = q.shape
    pages, page_size, kv_heads, _ = k_cache.shape
    dim_v, sharing, width = v_cache.shape[3], heads // kv_heads, page_table.shape[1]
    if out.numel() == 0:
        return
    machine = None if interpreted() else target()
    half, half_v, like = types(q.dtype, k_cache.dtype, machine)
    parts = max(1, triton.cdiv(width * page_size, PART.value))
    values = sums = None
    if parts > 1:
        values = q.new_empty((batch * rows * heads, parts, dim_v), dtype=torch.float32)
        sums = q.new_empty((batch * rows * heads, parts, 2), dtype=torch.float32)
    wide_v = padded(dim_v, 16)
    shape = rows, sharing, kv_heads, page_size
    with on_device(q):
        launch(
            attend_kernel, (batch * kv_heads * triton.cdiv(rows * sharing, ROWS.value), parts), 256,
            q, q.stride(0), q.stride(1), k_cache, *k_cache.stride()[:3], *scales(k_scale),
            v_cache, *v_cache.stride()[:3], *scales(v_scale), page_table, width, lengths, mask, scale,
            out, values, sums, *shape, pages, parts,
            D=dim, DV=dim_v, WIDE=padded(dim, 16), WIDE_V=wide_v,
            HALF=half, HALF_V=half_v, LIKE=like, TILE=tile(half, machine),
        )  # fmt: skip
        if parts > 1:
            launch(
                combine_kernel, (batch * rows * heads,), 128,
                values, sums, lengths, width, out, *shape, parts, DV=dim_v, WIDE_V=wide_v, TOGETHER=8,
            )  # fmt: skip


def scales(scale):
    return (None, 0, 0, 0) if scale is None else (scale, *scale.stride())


SIXTEEN = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def types(rows, cache, target):
    """HALF, HALF_V and LIKE of a target (None: the interpreter): how the products are taken, as in add_weighted."""
    half = half_v = None
    if cache is torch.int8 and rows in SIXTEEN:
        half, half_v = SIXTEEN[rows], tl.bfloat16
    elif rows is cache and rows in SIXTEEN:
        half = half_v = SIXTEEN[rows]
    like = half_v
    if half is None or target is None or not int8_dots(target):
        half = half_v = precision(target)
    elif target.backend == "hip":
        half, half_v = (BITS.value if of == tl.bfloat16 else of for of in (half, half_v))
    return half, half_v, like


def precision(target):
    """How float32 matrices are multiplied: in three products of 11 bits, if units take no more; None: not at all."""
    if target is None:
        return "ieee"
    if target.backend == "hip":
        return "ieee" if target.arch.startswith("gfx9") else None
    return "tf32x3" if target.arch >= 80 else None


def tile(half, target):
    """Keys per turn of the loop: few where whole products, or 256 registers and no more, have to hold them."""
    if half is None:
        return 4
    return 16 if target is not None and target.warp_size == 32 and target.backend == "hip" else 64
