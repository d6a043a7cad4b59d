"""attend_int8 on the GPU for float caches, by torch's scaled dot product attention. The arguments' form:
reference/attention.py.

The pages of a request are gathered side by side, and what a row sees becomes a mask made on the device: nothing waits
for it, and no bad length or page forms an address (their requests give NaN). The query heads that share a kv head go in
as further rows, so that keys and values are neither repeated nor read twice. int8 caches are left to Triton's kernel.

Which kernel torch takes depends on shapes, so a row's last bits may depend on how many rows a call has. Where that
matters, ``use_backend("triton")`` has an order of its own.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..registry import Unsupported


def attend_int8(q, k_cache, k_scale, v_cache, v_scale, page_table, lengths, mask, scale, out):
    if k_scale is not None:
        raise Unsupported("serves float caches only, got int8")
    batch, rows, heads, dim = q.shape
    pages, page, kv_heads = k_cache.shape[:3]
    width = page_table.shape[1]
    if not (pages and width and dim):
        raise Unsupported("serves caches with pages and heads with values only")
    if not out.numel():
        return
    lengths, table = lengths.long(), page_table.long()
    older = (lengths - rows)[:, None]  # keys in front of the request's rows
    key = torch.arange(width * page, device=q.device)
    good = (table >= 0) & (table < pages)
    used = torch.arange(0, width * page, page, device=q.device) < lengths[:, None]
    valid = (lengths >= rows) & (lengths <= width * page) & (good | ~used).all(1)
    seen = _seen(key - older, rows, mask)

    table = torch.where(good, table, 0)
    written = (key < lengths[:, None])[:, :, None, None]  # memory behind the keys may hold NaN, and 0 * NaN is NaN
    dtype = torch.promote_types(q.dtype, k_cache.dtype)
    k, v = (
        torch.where(written, cache[table].flatten(1, 2), 0).to(dtype).transpose(1, 2) for cache in (k_cache, v_cache)
    )
    shared = heads // kv_heads
    queries = q.to(dtype).view(batch, rows, kv_heads, shared, dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    y = scaled_dot_product_attention(queries, k, v, attn_mask=seen.repeat(1, shared, 1)[:, None], scale=scale)
    y = y.unflatten(2, (shared, rows)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    nothing = ~(valid[:, None] & seen.any(-1))
    out.copy_(y.masked_fill(nothing[:, :, None, None], torch.nan))


def _seen(offset, rows, mask):
    """[B, R, keys]: whether row r sees the key ``offset`` [B, keys] places behind the first of the rows' own."""
    own = torch.arange(rows, device=offset.device)[:, None]
    if mask is None:
        return offset[:, None] <= own
    marked = mask.gather(2, offset.clamp(0, rows - 1)[:, None].expand(-1, rows, -1))
    return (offset < 0)[:, None] | (offset < rows)[:, None] & marked
