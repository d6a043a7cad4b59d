"""Decode attention over a paged cache, and the rotary write that fills it.

A cache is a pair of tensors [pages, page_size, H_kv, D]: float32, or int8 with one float32 scale per (token, head) in
[pages, page_size, H_kv]. Keys and values have scales of their own, and a kept token's bytes never change, so rolling
back rejected drafts needs no copy.
"""

import torch

from . import native, registry, validate

_FLOAT = (torch.float32,)
_CACHE = (torch.float32, torch.int8)


def rope_write_kv_int8(k, v, cos, sin, k_cache, k_scale, v_cache, v_scale, slots, *, q=None):
    """Rotates ``k`` (and ``q``, in place), then writes ``k`` and ``v`` into the cache.

    Rotary embedding of Su et al. 2021 (RoFormer) on pairs (i, i + D/2), the layout of Hugging Face checkpoints:
    y[i] = x[i] cos[i] - x[i + D/2] sin[i], y[i + D/2] = x[i + D/2] cos[i] + x[i] sin[i].

    k, v: f32 [T, H_kv, D]; q: f32 [T, H, D] or None; heads contiguous inside a token's row, any row stride.
    cos, sin: f32 [T, D/2], one row per token. slots: int64 [T], index of the token in the cache (page * page_size +
    offset); -1 skips the token. Caches as in the module's text; ``k_scale`` and ``v_scale`` are None for float caches.
    int8 codes follow ``quantize_int8`` with one group per head. Raises TypeError, ValueError.
    """
    validate.tensor("k", k, _FLOAT, 3)
    validate.tensor("v", v, _FLOAT, 3, k.device)
    if v.shape != k.shape:
        raise ValueError(f"v: expected k's shape {list(k.shape)}, got {list(v.shape)}")
    tokens, heads, dim = k.shape
    if dim % 2:
        raise ValueError(f"k: expected an even head dimension, got {dim}")
    _heads("k", k)
    _heads("v", v)
    if q is not None:
        validate.tensor("q", q, _FLOAT, 3, k.device)
        if q.shape[0] != tokens or q.shape[2] != dim:
            raise ValueError(f"q: expected shape [{tokens}, heads, {dim}], got {list(q.shape)}")
        _heads("q", q)
    for name, table in (("cos", cos), ("sin", sin)):
        validate.tensor(name, table, _FLOAT, 2, k.device)
        if table.shape[0] != tokens or table.shape[1] != dim // 2:
            raise ValueError(f"{name}: expected shape [{tokens}, {dim // 2}], got {list(table.shape)}")
        validate.rows(name, table)
    if cos.stride(0) != sin.stride(0):
        raise ValueError(f"sin: expected cos's row stride {cos.stride(0)}, got {sin.stride(0)}")
    validate.tensor("slots", slots, (torch.int64,), 1, k.device)
    if slots.shape[0] != tokens or (tokens > 1 and slots.stride(0) != 1):
        raise ValueError(f"slots: expected a contiguous [{tokens}], got {list(slots.shape)}")
    _caches(k_cache, k_scale, v_cache, v_scale, heads, dim, k.device)
    registry.call("rope_write_kv_int8", k.device.type, q, k, v, cos, sin, k_cache, k_scale, v_cache, v_scale, slots)


def attend_int8(q, k_cache, k_scale, v_cache, v_scale, page_table, lengths, *, mask=None, scale=None, out=None):
    """Softmax attention of a few query rows per request over its cached keys: returns f32 [B, R, H, D].

    q: f32 [B, R, H, D], the last R tokens of each request (already rotated, their keys already in the cache).
    page_table: int32 [B, P] page numbers in order; lengths: int32 [B], tokens in the cache including the R rows. Row r
    sees keys 0 .. lengths - R + r (causal), or with ``mask`` (bool [B, R, R]) every older key and those of the last R
    where mask[b, r] is True. H is a multiple of H_kv: query head h reads kv head h // (H / H_kv). ``scale`` defaults to
    D ** -0.5. Row r's bits do not depend on R. Raises TypeError, ValueError.
    """
    validate.tensor("q", q, _FLOAT, 4)
    batch, rows, heads, dim = q.shape
    if q.numel() and (q.stride(3) != 1 or (heads > 1 and q.stride(2) != dim)):
        raise ValueError(f"q: expected heads contiguous inside a row, got strides {list(q.stride())}")
    kv_heads = _caches(k_cache, k_scale, v_cache, v_scale, None, dim, q.device)
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q: expected a multiple of {kv_heads} heads like the cache's, got {heads}")
    validate.tensor("page_table", page_table, (torch.int32,), 2, q.device)
    validate.tensor("lengths", lengths, (torch.int32,), 1, q.device)
    if page_table.shape[0] != batch or not page_table.is_contiguous():
        raise ValueError(f"page_table: expected a contiguous [{batch}, pages], got {list(page_table.shape)}")
    if lengths.shape[0] != batch or not lengths.is_contiguous():
        raise ValueError(f"lengths: expected a contiguous [{batch}], got {list(lengths.shape)}")
    if mask is not None:
        validate.tensor("mask", mask, (torch.bool,), 3, q.device)
        validate.shape("mask", mask, (batch, rows, rows))
        if not mask.is_contiguous():
            native.not_recordable("mask had to be copied: it is not contiguous")
            mask = mask.contiguous()
    if out is None:
        out = q.new_empty(q.shape)
    else:
        validate.tensor("out", out, _FLOAT, 4, q.device)
        if out.shape != q.shape or not out.is_contiguous():
            raise ValueError(f"out: expected a contiguous {list(q.shape)}, got {list(out.shape)}")
        validate.no_overlap("out", out, "q", q)
    registry.call(
        "attend_int8",
        q.device.type,
        q,
        k_cache,
        k_scale,
        v_cache,
        v_scale,
        page_table,
        lengths,
        mask,
        dim**-0.5 if scale is None else float(scale),
        out,
    )
    return out


def _heads(name, x):
    _, heads, dim = x.shape
    if x.numel() and (x.stride(2) != 1 or (heads > 1 and x.stride(1) != dim)):
        raise ValueError(f"{name}: expected heads contiguous inside a row, got strides {list(x.stride())}")


def _caches(k_cache, k_scale, v_cache, v_scale, heads, dim, device):
    """Checks the pair of caches and returns the number of kv heads."""
    validate.tensor("k_cache", k_cache, _CACHE, 4, device)
    validate.tensor("v_cache", v_cache, (k_cache.dtype,), 4, device)
    expected = k_cache.shape
    if (heads is not None and expected[2] != heads) or expected[3] != dim:
        raise ValueError(f"k_cache: expected [pages, page_size, {heads}, {dim}], got {list(expected)}")
    if v_cache.shape != expected:
        raise ValueError(f"v_cache: expected k_cache's shape {list(expected)}, got {list(v_cache.shape)}")
    if expected[1] == 0:
        raise ValueError("k_cache: expected a page size of at least 1, got 0")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("k_cache, v_cache: expected contiguous tensors")
    for name, value in (("k_scale", k_scale), ("v_scale", v_scale)):
        if k_cache.dtype is torch.float32:
            if value is not None:
                raise ValueError(f"{name}: expected None for a float cache, got a tensor")
        else:
            validate.tensor(name, value, _FLOAT, 3, device)
            validate.shape(name, value, expected[:3])
            if not value.is_contiguous():
                raise ValueError(f"{name}: expected a contiguous tensor")
    return expected[2]
