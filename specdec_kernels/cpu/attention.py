"""C++ attention family."""

import torch

from .. import native
from ..native import DTYPE_CODE, launch

_rope_write_kv = native.cpu.rope_write_kv
_attend = native.cpu.attend

_CACHE_CODE = {**DTYPE_CODE, torch.int8: 3}
_NO_SCALE = (0, 0, 0, 0)


def rope_write_kv_int8(*args):
    launch(_rope_write_kv, rope_write(*args), native.threads())


def attend_int8(*args):
    launch(_attend, attend(*args), native.threads())


def rope_write(q, k, v, cos, sin, k_cache, k_scale, v_cache, v_scale, slots, hadamard):
    """sk::RopeWrite, field by field."""
    return (
        DTYPE_CODE[k.dtype],
        0 if q is None else q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        0 if q is None else q.stride(0),
        k.stride(0),
        v.stride(0),
        cos.stride(0),
        k.shape[0],
        0 if q is None else q.shape[1],
        slots.data_ptr(),
        hadamard,
        cache(k_cache, k_scale, v_cache, v_scale),
    )


def attend(q, k_cache, k_scale, v_cache, v_scale, page_table, lengths, mask, scale, out):
    """sk::Attend, field by field."""
    batch, rows, heads, _ = q.shape
    return (
        DTYPE_CODE[q.dtype],
        q.data_ptr(),
        out.data_ptr(),
        q.stride(0),
        q.stride(1),
        batch,
        rows,
        heads,
        page_table.shape[1],
        page_table.data_ptr(),
        lengths.data_ptr(),
        0 if mask is None else mask.data_ptr(),
        scale,
        cache(k_cache, k_scale, v_cache, v_scale),
    )


def cache(k_cache, k_scale, v_cache, v_scale):
    """sk::Cache, field by field."""
    return (
        _CACHE_CODE[k_cache.dtype],
        k_cache.data_ptr(),
        *k_cache.stride()[:3],
        v_cache.data_ptr(),
        *v_cache.stride()[:3],
        *(_NO_SCALE if k_scale is None else (k_scale.data_ptr(), *k_scale.stride())),
        *(_NO_SCALE if v_scale is None else (v_scale.data_ptr(), *v_scale.stride())),
        *k_cache.shape,
        v_cache.shape[3],
    )
