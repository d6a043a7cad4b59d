"""C++ attention family."""

from .. import native
from ..native import launch

_rope_write_kv = native.cpu.rope_write_kv
_attend = native.cpu.attend


def rope_write_kv_int8(q, k, v, cos, sin, k_cache, k_scale, v_cache, v_scale, slots):
    tokens, heads, dim = k.shape
    launch(
        _rope_write_kv,
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


def attend_int8(q, k_cache, k_scale, v_cache, v_scale, page_table, lengths, mask, scale, out):
    batch, rows, heads, dim = q.shape
    pages, page_size, kv_heads, _ = k_cache.shape
    launch(
        _attend,
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
        native.threads(),
    )
