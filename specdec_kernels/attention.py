"""Decode attention over a paged cache, and the rotary write that fills it.

A cache is a pair of tensors, keys [pages, page_size, H_kv, D] and values [pages, page_size, H_kv, Dv]: int8 with one
f32 scale per (token, head) in [pages, page_size, H_kv], or f32, f16, bf16 without scales. The first three dimensions of
caches and scales may have any strides (block-major and head-major views); the last one is contiguous. Keys and values
have scales of their own, and a kept token's bytes never change, so rolling back rejected drafts needs no copy.

The form that the backends get (checked; strides are read from the tensors):

    rope_write_kv_int8(q, k, v, cos, sin, k_cache, k_scale, v_cache, v_scale, slots, hadamard)
    attend_int8(q, k_cache, k_scale, v_cache, v_scale, page_table, lengths, mask, scale, out)

q (of the write) and mask may be None; both scales are None for float caches; cos and sin have the same row stride;
slots, page_table, lengths, mask and out are contiguous.
"""

import math

import torch

from . import native, registry, validate

_FLOATS = validate.FLOATS
_CACHES = (torch.int8, *_FLOATS)
_F32, _I32, _I64, _BOOL = (torch.float32,), (torch.int32,), (torch.int64,), (torch.bool,)


def rope_write_kv_int8(k, v, cos, sin, k_cache, k_scale, v_cache, v_scale, slots, *, q=None, hadamard=False):
    """Rotates ``k`` (and ``q``, in place), then writes ``k`` and ``v`` into the cache.

    Rotary embedding of Su et al. 2021 (RoFormer) on pairs (i, i + D/2), the layout of Hugging Face checkpoints, in f32
    and rounded to k.dtype: y[i] = x[i] cos[i] - x[i + D/2] sin[i], y[i + D/2] = x[i + D/2] cos[i] + x[i] sin[i].
    ``v`` is not rotated. A float cache takes the values in its own dtype; int8 codes and scales are those of
    ``quantize_int8`` with one group per (token, head).

    ``hadamard``: the heads of q and of k, as rounded above, are then multiplied by the Hadamard matrix of D (a power of
    two; rotation.py), in f32, times a power of two (:func:`hadamard_factors`) and rounded to k.dtype. No q . k changes
    by that, but a key's few large channels no longer set the step size of all others (as in QuaRot, arXiv 2404.00456).

    k: [T, H_kv, D], v: [T, H_kv, Dv], q: [T, H, D] or None, all f32, f16 or bf16 of one dtype; heads contiguous inside
    a token's row, any row stride; D even. cos, sin: f32 [T, D/2], one row per token. slots: int64 [T], index of the
    token in the cache (page * page_size + offset); -1 skips the token; of tokens with the same slot the last one stays.
    Caches as in the module's text. Raises TypeError, ValueError (on the CPU also for a slot outside the cache; a GPU
    skips it).
    """
    arguments = rope_write_arguments(q, k, v, cos, sin, k_cache, k_scale, v_cache, v_scale, slots, hadamard)
    registry.call("rope_write_kv_int8", validate.device_type(k), *arguments)


def attend_int8(q, k_cache, k_scale, v_cache, v_scale, page_table, lengths, *, mask=None, scale=None, out=None):
    """Softmax attention of a few query rows per request over its cached keys: returns [B, R, H, Dv] in q's dtype.

    out[b, r, h] = sum_j softmax_j(scale * q[b, r, h] . k_j) v_j, with f32 arithmetic (float64 in the reference) on the
    dequantised keys and values, rounded once.

    q: f32, f16 or bf16 [B, R, H, D], the last R tokens of each request (already rotated, their keys already in the
    cache), heads contiguous inside a row, any row and batch stride. page_table: int32 [B, P] page numbers in order;
    lengths: int32 [B], tokens in the cache including the R rows. Row r sees keys 0 .. lengths - R + r (causal), or with
    ``mask`` (bool [B, R, R]) every older key and those of the last R where mask[b, r] is True; a row that sees none is
    NaN. H is a multiple of H_kv: query head h reads kv head h // (H / H_kv). ``scale`` defaults to D ** -0.5. ``out``:
    a contiguous tensor to write to. Caches as in the module's text. A row's bits do not depend on R or B. Raises
    TypeError, ValueError (on the CPU also for a length or page out of range; on a GPU such a request's rows are NaN).
    """
    arguments = attend_arguments(q, k_cache, k_scale, v_cache, v_scale, page_table, lengths, mask, scale, out)
    registry.call("attend_int8", validate.device_type(q), *arguments)
    return arguments[-1]


def hadamard_factors(dim):
    """What rotated queries and keys are multiplied by: powers of two, their product 1 / dim."""
    steps = dim.bit_length() - 1
    return 0.5 ** (steps // 2), 0.5 ** (steps - steps // 2)


def rope_write_arguments(q, k, v, cos, sin, k_cache, k_scale, v_cache, v_scale, slots, hadamard):
    """The arguments of ``rope_write_kv_int8``, checked."""
    validate.tensor("k", k, _FLOATS, 3)
    device, dtype = k.device, (k.dtype,)
    tokens, kv_heads, dim = k.shape
    validate.tensor("v", v, dtype, 3, device)
    if v.shape[0] != tokens or v.shape[1] != kv_heads:
        raise ValueError(f"v: expected shape [{tokens}, {kv_heads}, Dv] like k's, got {list(v.shape)}")
    if dim % 2:
        raise ValueError(f"k: expected an even head dimension, got {dim}")
    if hadamard and (dim == 0 or dim & (dim - 1)):
        raise ValueError(f"hadamard: expected a head dimension that is a power of two, got {dim}")
    _heads("k", k, k.stride(), dim)
    _heads("v", v, v.stride(), v.shape[2])
    if q is not None:
        validate.tensor("q", q, dtype, 3, device)
        if q.shape[0] != tokens or q.shape[2] != dim:
            raise ValueError(f"q: expected shape [{tokens}, heads, {dim}], got {list(q.shape)}")
        _heads("q", q, q.stride(), dim)
        if q.stride(0) < q.shape[1] * dim and tokens > 1:
            raise ValueError(f"q: expected rows of their own (it is rotated in place), got strides {list(q.stride())}")
    for name, table in (("cos", cos), ("sin", sin)):
        validate.tensor(name, table, _F32, 2, device)
        if table.shape[0] != tokens or table.shape[1] != dim // 2:
            raise ValueError(f"{name}: expected shape [{tokens}, {dim // 2}], got {list(table.shape)}")
        validate.rows(name, table)
    if cos.stride(0) != sin.stride(0) and tokens > 1:
        raise ValueError(f"sin: expected cos's row stride {cos.stride(0)}, got {sin.stride(0)}")
    validate.vector("slots", slots, _I64, tokens, device)
    if not slots.is_contiguous():
        raise ValueError(f"slots: expected a contiguous tensor, got stride {slots.stride(0)}")
    _caches(k_cache, k_scale, v_cache, v_scale, device)
    for name, cache, x in (("k_cache", k_cache, k), ("v_cache", v_cache, v)):
        if cache.shape[2] != kv_heads or cache.shape[3] != x.shape[2]:
            raise ValueError(
                f"{name}: expected [pages, page_size, {kv_heads}, {x.shape[2]}] like {name[0]}, got {list(cache.shape)}"
            )
        _one_place_each(name, cache)
    if k_scale is not None:
        _one_place_each("k_scale", k_scale)
        _one_place_each("v_scale", v_scale)
    # Strided caches may lie between other things; contiguous ones, and q, have memory of their own.
    inputs = {"k": k.flatten(1), "v": v.flatten(1), "cos": cos, "sin": sin, "slots": slots}
    caches = {"k_cache": k_cache, "k_scale": k_scale, "v_cache": v_cache, "v_scale": v_scale}
    outputs = {name: t for name, t in caches.items() if t is not None and t.is_contiguous()}
    if q is not None:
        outputs["q"] = q.flatten(1)
    validate.disjoint(outputs, inputs)
    return q, k, v, cos, sin, k_cache, k_scale, v_cache, v_scale, slots, bool(hadamard)


def attend_arguments(q, k_cache, k_scale, v_cache, v_scale, page_table, lengths, mask, scale, out):
    """The arguments of ``attend_int8``, checked, with a scale and an output."""
    validate.tensor("q", q, _FLOATS, 4)
    batch, rows, heads, dim = q.shape
    device = q.device
    strides = q.stride()
    if ((strides[3] != 1 and dim > 1) or (strides[2] != dim and heads > 1)) and q.numel():
        raise ValueError(f"q: expected heads contiguous inside a row, got strides {list(strides)}")
    _caches(k_cache, k_scale, v_cache, v_scale, device)
    kv_heads = k_cache.shape[2]
    if k_cache.shape[3] != dim:
        raise ValueError(f"k_cache: expected heads of {dim} values like q's, got shape {list(k_cache.shape)}")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q: expected a multiple of {kv_heads} heads like the cache's, got {heads}")
    validate.tensor("page_table", page_table, _I32, 2, device)
    if page_table.shape[0] != batch or not page_table.is_contiguous():
        raise ValueError(f"page_table: expected a contiguous [{batch}, pages], got {list(page_table.shape)}")
    validate.vector("lengths", lengths, _I32, batch, device)
    if not lengths.is_contiguous():
        raise ValueError(f"lengths: expected a contiguous tensor, got stride {lengths.stride(0)}")
    if mask is not None:
        validate.tensor("mask", mask, _BOOL, 3, device)
        validate.shape("mask", mask, (batch, rows, rows))
        if not mask.is_contiguous():
            native.not_recordable("mask had to be copied: it is not contiguous")
            mask = mask.contiguous()
    scale = dim**-0.5 if scale is None and dim else _number("scale", 1.0 if scale is None else scale)
    values = v_cache.shape[3]
    if out is None:
        out = q.new_empty((batch, rows, heads, values))
    else:
        validate.tensor("out", out, (q.dtype,), 4, device)
        if out.shape != (batch, rows, heads, values) or not out.is_contiguous():
            raise ValueError(
                f"out: expected a contiguous [{batch}, {rows}, {heads}, {values}], got {list(out.shape)} "
                f"with strides {list(out.stride())}"
            )
        caches = {"k_cache": k_cache, "k_scale": k_scale, "v_cache": v_cache, "v_scale": v_scale}
        inputs = {"q": q, "page_table": page_table, "lengths": lengths, "mask": mask, **caches}
        validate.disjoint({"out": out}, {name: t for name, t in inputs.items() if t is not None})
    return q, k_cache, k_scale, v_cache, v_scale, page_table, lengths, mask, scale, out


def _number(name, value):
    value = float(value)
    if not math.isfinite(value):
        raise ValueError(f"{name}: expected a finite number, got {value}")
    return value


def _heads(name, x, strides, dim):
    if ((strides[2] != 1 and dim > 1) or (strides[1] != dim and x.shape[1] > 1)) and x.numel():
        raise ValueError(f"{name}: expected heads contiguous inside a row, got strides {list(strides)}")


def _caches(k_cache, k_scale, v_cache, v_scale, device):
    """Checks that the four tensors are a cache."""
    validate.tensor("k_cache", k_cache, _CACHES, 4, device)
    validate.tensor("v_cache", v_cache, (k_cache.dtype,), 4, device)
    pages, page, heads, _ = k_cache.shape
    if v_cache.shape[:3] != (pages, page, heads):
        raise ValueError(f"v_cache: expected [{pages}, {page}, {heads}, Dv] like k_cache, got {list(v_cache.shape)}")
    if page == 0:
        raise ValueError("k_cache: expected a page size of at least 1, got 0")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.stride(3) != 1 and cache.shape[3] > 1:
            raise ValueError(f"{name}: expected a contiguous last dimension, got strides {list(cache.stride())}")
    for name, value in (("k_scale", k_scale), ("v_scale", v_scale)):
        if k_cache.dtype is not torch.int8:
            if value is not None:
                raise ValueError(f"{name}: expected None for a float cache, got {type(value).__name__}")
        else:
            validate.tensor(name, value, _F32, 3, device)
            if value.shape != (pages, page, heads):
                raise ValueError(f"{name}: expected shape [{pages}, {page}, {heads}], got {list(value.shape)}")


def _one_place_each(name, cache):
    """Refuses an expanded tensor, where several tokens or heads would be written to one place."""
    if 0 in cache.stride():
        for size, stride in zip(cache.shape, cache.stride(), strict=True):
            if stride == 0 and size > 1:
                raise ValueError(
                    f"{name}: expected memory for every token and head, got strides {list(cache.stride())}"
                )
