"""rope_write_kv_int8: rotates q and k, and writes k and v into the paged cache (reference/attention.py says the same).

Programs (token, block of HEADS heads of q, k or v); a head of k or v has one scale, so that a program quantises as it
writes. Of tokens with the same slot the last one has to stay, whatever order the programs run in: a program looks for
its slot among the SCAN later ones; longer calls first find out who was last, by an atomic maximum per slot.
"""

import torch
import triton
import triton.language as tl

from ..attention import hadamard_factors
from .codes import codes_of, grid_of, rounded, store_rounded, survey, widened, wider
from .launch import launch, on_device, padded
from .rotation import hadamard

SCAN = 256


@triton.jit(do_not_specialize=["tokens"])
def last_kernel(slots, last, tokens, places, FIRST: tl.constexpr, N: tl.constexpr):
    """last[slot] = the largest token of a slot, in two launches: any of its tokens (FIRST), then the maximum."""
    t = tl.program_id(0) * N + tl.arange(0, N)
    slot = tl.load(slots + t, mask=t < tokens, other=-1)
    there = (slot >= 0) & (slot < places)
    to = last + tl.where(there, slot, 0)
    if FIRST:
        tl.store(to, t, mask=there)
    else:
        tl.atomic_max(to, t, mask=there, sem="relaxed")


@triton.jit
def rotary(x, cos, sin, inside, dim, FACTOR: tl.constexpr, STAGES: tl.constexpr):
    """Both halves of the rotated rows, float32 values of x's type; cos and sin [1, HALF]. STAGES > 0: the heads of
    2^STAGES values are then multiplied by the Hadamard matrix times FACTOR, whose last stage joins the halves."""
    like: tl.constexpr = x.dtype.element_ty
    u = widened(tl.load(x, mask=inside, other=0.0))
    v = widened(tl.load(x + dim // 2, mask=inside, other=0.0))
    a = rounded(u * cos - v * sin, like)
    b = rounded(v * cos + u * sin, like)
    if STAGES > 0:
        u = hadamard(a, a.shape[0], a.shape[1], STAGES - 1)
        v = hadamard(b, b.shape[0], b.shape[1], STAGES - 1)
        a = rounded((u + v) * FACTOR, like)
        b = rounded((u - v) * FACTOR, like)
    return a, b


@triton.jit
def put(cache, y, grid, inside):
    if cache.dtype.element_ty == tl.int8:
        tl.store(cache, codes_of(y, grid, 0.0, True, False, False), mask=inside)
    else:
        store_rounded(cache, y, inside)


@triton.jit(do_not_specialize=["tokens"])
def rope_kernel(
    q, q_stride, k, k_stride, v, v_stride, cos, cos_stride, sin, sin_stride, slots, last,
    k_cache, k_page, k_place, k_head, k_scale, ks_page, ks_place, ks_head,
    v_cache, v_page, v_place, v_head, v_scale, vs_page, vs_place, vs_head,
    tokens, q_heads, heads, dim, values, places, page_size, q_blocks, blocks,
    HEADS: tl.constexpr, HALF: tl.constexpr, VALUES: tl.constexpr, SCAN: tl.constexpr,
    Q_FACTOR: tl.constexpr, K_FACTOR: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    part = tl.program_id(1)
    t = token.to(tl.int64)
    half = tl.arange(0, HALF)[None, :]
    in_half = half < dim // 2

    if part < q_blocks:
        head = part * HEADS + tl.arange(0, HEADS)
        inside = (head < q_heads)[:, None] & in_half
        c = tl.load(cos + t * cos_stride + half, mask=in_half, other=0.0)
        s = tl.load(sin + t * sin_stride + half, mask=in_half, other=0.0)
        to = q + t * q_stride + head[:, None] * dim + half
        a, b = rotary(to, c, s, inside, dim, Q_FACTOR, STAGES)
        tl.debug_barrier()  # in place: other threads may hold the same values
        store_rounded(to, a, inside)
        store_rounded(to + dim // 2, b, inside)
    else:
        slot = tl.load(slots + t)
        kept = (slot >= 0) & (slot < places)
        slot = tl.where(kept, slot, 0)
        if last is None:
            later = token + 1 + tl.arange(0, SCAN)
            same = tl.load(slots + later, mask=later < tokens, other=-1) == slot
            kept = kept & (tl.max(same.to(tl.int32), axis=0) == 0)
        else:
            kept = kept & (tl.load(last + slot, mask=kept, other=-1) == token)
        page = slot // page_size
        place = slot - page * page_size
        block = part - q_blocks
        is_v = block >= blocks
        head = tl.where(is_v, block - blocks, block) * HEADS + tl.arange(0, HEADS)
        real = (head < heads) & kept
        h = head.to(tl.int64)
        if is_v:
            i = tl.arange(0, VALUES)[None, :]
            in_v = real[:, None] & (i < values)
            y = widened(tl.load(v + t * v_stride + head[:, None] * values + i, mask=in_v, other=0.0))
            grid = grid_of(survey(y), True)
            if v_scale is not None:
                tl.store(v_scale + page * vs_page + place * vs_place + h * vs_head, grid.scale, mask=real)
            put(v_cache + page * v_page + place * v_place + h[:, None] * v_head + i, y, grid, in_v)
        else:
            inside = real[:, None] & in_half
            c = tl.load(cos + t * cos_stride + half, mask=in_half, other=0.0)
            s = tl.load(sin + t * sin_stride + half, mask=in_half, other=0.0)
            a, b = rotary(k + t * k_stride + head[:, None] * dim + half, c, s, inside, dim, K_FACTOR, STAGES)
            grid = grid_of(wider(survey(a), survey(b)), True)
            if k_scale is not None:
                tl.store(k_scale + page * ks_page + place * ks_place + h * ks_head, grid.scale, mask=real)
            at = k_cache + page * k_page + place * k_place + h[:, None] * k_head + half
            put(at, a, grid, inside)
            put(at + dim // 2, b, grid, inside)


def tile(dim, values):
    """(HEADS, HALF, VALUES) of a program for heads of that size: about 1024 values."""
    half, values = padded(dim // 2, 1), padded(values, 1)
    return max(1024 // max(2 * half, values), 1), half, values


def last_tokens(slots, places):
    """int32 [places]: at each slot that is written the last token that does."""
    last = torch.empty(places, dtype=torch.int32, device=slots.device)
    tokens = len(slots)
    for first in (True, False):
        launch(last_kernel, (triton.cdiv(tokens, 256),), 128, slots, last, tokens, places, FIRST=first, N=256)
    return last


def rope_write_kv_int8(q, k, v, cos, sin, k_cache, k_scale, v_cache, v_scale, slots, with_hadamard):
    tokens, heads, dim = k.shape
    if tokens == 0:
        return
    values, page_size = v.shape[2], k_cache.shape[1]
    places = k_cache.shape[0] * page_size
    together, half, wide = tile(dim, values)
    q_heads = 0 if q is None else q.shape[1]
    q_blocks, blocks = triton.cdiv(q_heads, together), triton.cdiv(heads, together)
    of_q, of_k = hadamard_factors(dim) if with_hadamard else (1.0, 1.0)
    with on_device(k):
        launch(
            rope_kernel, (tokens, q_blocks + 2 * blocks), 128,
            q, 0 if q is None else q.stride(0), k, k.stride(0), v, v.stride(0),
            cos, cos.stride(0), sin, sin.stride(0), slots, last_tokens(slots, places) if tokens > SCAN else None,
            *_paged(k_cache), *_paged(k_scale), *_paged(v_cache), *_paged(v_scale),
            tokens, q_heads, heads, dim, values, places, page_size, q_blocks, blocks,
            HEADS=together, HALF=half, VALUES=wide, SCAN=SCAN,
            Q_FACTOR=of_q, K_FACTOR=of_k, STAGES=dim.bit_length() - 1 if with_hadamard else 0,
        )  # fmt: skip


def _paged(tensor):
    """(tensor or None, step per page, per place in it, per head)."""
    return (None, 0, 0, 0) if tensor is None else (tensor, *tensor.stride()[:3])
