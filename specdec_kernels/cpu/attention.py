"""C++ attention family."""

import torch

from .. import native
from ..native import launch
from ..registry import Unsupported

_rope_write_kv = native.cpu.rope_write_kv
_attend = native.cpu.attend


def rope_write_kv_int8(*args):
    launch(_rope_write_kv, rope_write(*args))


def attend_int8(*args):
    launch(_attend, attend(*args), native.threads())


def rope_write(q, k, v, cos, sin, k_cache, k_scale, v_cache, v_scale, slots):
    """sk::RopeWrite, field by field."""
    tokens, heads, dim = k.shape
    _served(k, k_cache, k_scale, v_cache, v_scale)
    return (
        0 if q is None else q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        0 if q is None else q.stride(0),
        k.stride(0),
        v.stride(0),
        cos.stride(0),
        tokens,
        0 if q is None else q.shape[1],
        heads,
        dim,
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        0 if k_scale is None else k_scale.data_ptr(),
        0 if v_scale is None else v_scale.data_ptr(),
        slots.data_ptr(),
        k_cache.shape[0] * k_cache.shape[1],
    )


def attend(q, k_cache, k_scale, v_cache, v_scale, page_table, lengths, mask, scale, out):
    """sk::Attend, field by field."""
    batch, rows, heads, dim = q.shape
    pages, page_size, kv_heads, _ = k_cache.shape
    _served(q, k_cache, k_scale, v_cache, v_scale)
    return (
        q.data_ptr(),
        out.data_ptr(),
        q.stride(0),
        q.stride(1),
        batch,
        rows,
        heads,
        kv_heads,
        dim,
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        0 if k_scale is None else k_scale.data_ptr(),
        0 if v_scale is None else v_scale.data_ptr(),
        page_size,
        pages,
        page_table.shape[1],
        page_table.data_ptr(),
        lengths.data_ptr(),
        0 if mask is None else mask.data_ptr(),
        scale,
    )


def _served(x, k_cache, k_scale, v_cache, v_scale):
    """For a moment: float32 rows, contiguous caches of one head size."""
    if x.dtype is not torch.float32 or k_cache.dtype not in (torch.int8, torch.float32):
        raise Unsupported("float32 only")
    if k_cache.shape != v_cache.shape or not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise Unsupported("contiguous caches of one head size only")
    if k_scale is not None and not (k_scale.is_contiguous() and v_scale.is_contiguous()):
        raise Unsupported("contiguous scales only")
