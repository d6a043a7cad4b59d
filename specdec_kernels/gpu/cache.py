"""The rotary write to a cache; a packed matrix, or rows of it, as floats. The form: attention.py, linear.py."""

import torch

from ..native import DTYPE_CODE
from ..registry import Unsupported
from .linear import LONGEST_ROTATION

_NO_SCALE = 0, (0, 0, 0)


def bind(compiled, place):
    """The operations on top of a compiled module."""

    def rope_write_kv_int8(q, k, v, cos, sin, k_cache, k_scale, v_cache, v_scale, slots, hadamard):
        if hadamard:
            raise Unsupported("hadamard=True")
        tokens, kv_heads, dim = k.shape
        compiled.rope_write_kv_int8(
            DTYPE_CODE[k.dtype],
            tokens,
            0 if q is None else q.shape[1],
            kv_heads,
            dim,
            v.shape[2],
            (0, 0) if q is None else (q.data_ptr(), q.stride(0)),
            (k.data_ptr(), k.stride(0)),
            (v.data_ptr(), v.stride(0)),
            (cos.data_ptr(), cos.stride(0)),
            (sin.data_ptr(), sin.stride(0)),
            slots.data_ptr(),
            *k_cache.shape[:2],
            0 if k_cache.dtype is torch.int8 else DTYPE_CODE[k_cache.dtype],
            *_placed(k_cache),
            *_placed(k_scale),
            *_placed(v_cache),
            *_placed(v_scale),
            *place(k),
        )

    def rows_int8(ids, weight, out):
        n, k, group, rotated, codes, scale = weight.native
        compiled.rows_int8(
            ids.shape[0], ids.data_ptr(), n, k, group, codes, scale, rotated, out.data_ptr(), out.stride(0), *place(ids)
        )

    def expand(weight, out):
        if weight.rotated and weight.group_size > LONGEST_ROTATION:
            raise Unsupported(f"rotates groups of at most {LONGEST_ROTATION} values, got {weight.group_size}")
        compiled.expand(*weight.native, DTYPE_CODE[out.dtype], out.data_ptr(), out.stride(0), *place(out))

    return {"rope_write_kv_int8": rope_write_kv_int8, "rows_int8": rows_int8, "expand": expand}


def _placed(value):
    """Address and strides of the first three dimensions of a cache or its scales."""
    return _NO_SCALE if value is None else (value.data_ptr(), value.stride()[:3])
