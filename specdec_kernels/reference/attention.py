"""Reference of the attention family. The arguments' form and their meaning: specdec_kernels/attention.py."""

import torch

from ..attention import hadamard_factors
from ..rotation import hadamard as rotated
from .quantize import quantize_int8


def rope_write_kv_int8(q, k, v, cos, sin, k_cache, k_scale, v_cache, v_scale, slots, hadamard):
    pages, page_size = k_cache.shape[:2]
    inside = (slots >= 0) & (slots < pages * page_size)
    if slots.is_cpu and not bool((inside | (slots == -1)).all()):
        raise ValueError("slots: expected -1 or an index inside the cache")
    if hadamard:
        of_q, of_k = hadamard_factors(k.shape[2])
    else:
        of_q = of_k = None
    if q is not None:
        q.copy_(_rotate(q, cos, sin, of_q))
    overwritten = (slots[:, None] == slots).triu(1).any(1)  # by a later token
    kept = inside & ~overwritten
    page, offset = slots[kept] // page_size, slots[kept] % page_size
    for x, cache, scale in ((_rotate(k, cos, sin, of_k), k_cache, k_scale), (v, v_cache, v_scale)):
        x = x[kept]
        if scale is None:
            cache[page, offset] = x.to(cache.dtype)
        else:
            codes, scales = x.new_empty(x.shape, dtype=torch.int8), scale.new_empty((*x.shape[:2], 1))
            quantize_int8(x, x.shape[2], True, False, None, 0, codes, scales, None, None)
            cache[page, offset] = codes
            scale[page, offset] = scales[..., 0]


def _rotate(x, cos, sin, factor):
    """The rotary embedding, then the Hadamard matrix times ``factor``, if there is one."""
    a, b = x.float().chunk(2, -1)
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    y = torch.cat([a * c - b * s, b * c + a * s], -1).to(x.dtype)
    return y if factor is None else (rotated(y) * factor).to(x.dtype)


def attend_int8(q, k_cache, k_scale, v_cache, v_scale, page_table, lengths, mask, scale, out):
    batch, rows, heads, dim = q.shape
    pages, page_size, kv_heads = k_cache.shape[:3]
    for b in range(batch):
        keys = int(lengths[b])
        used = page_table[b, : -(-keys // page_size)].long()
        problem = None
        if keys < rows or keys > page_table.shape[1] * page_size:
            problem = "lengths: expected at least the number of query rows and at most the pages of the request"
        elif not bool(((used >= 0) & (used < pages)).all()):
            problem = "page_table: expected page numbers inside the cache"
        if problem:
            if q.is_cpu:
                raise ValueError(problem)
            out[b] = torch.nan
            continue
        k, v = _gather(k_cache, k_scale, used, keys), _gather(v_cache, v_scale, used, keys)
        for r in range(rows):
            older = keys - rows
            seen = slice(0, older + r + 1)
            if mask is not None:
                seen = torch.cat([mask.new_ones(older), mask[b, r]]).nonzero()[:, 0]
            queries = q[b, r].double().view(kv_heads, heads // kv_heads, dim)
            scores = torch.einsum("hgd,nhd->hgn", queries, k[seen]) * scale
            values = torch.einsum("hgn,nhd->hgd", torch.softmax(scores, -1), v[seen])
            out[b, r] = values.flatten(0, 1) if scores.shape[-1] else torch.nan


def _gather(cache, scale, pages, keys):
    """The request's keys or values in order, dequantised: float64 [keys, H_kv, D]."""
    x = cache[pages].flatten(0, 1)[:keys].double()
    return x if scale is None else x * scale[pages].flatten(0, 1)[:keys, :, None].double()
