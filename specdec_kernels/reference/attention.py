"""Reference of the attention family. Arguments arrive validated; see specdec_kernels/attention.py for their meaning."""

import torch


def rope_write_kv_int8(q, k, v, cos, sin, k_cache, k_scale, v_cache, v_scale, slots):
    tokens, heads, dim = k.shape
    cache_slots = k_cache.shape[0] * k_cache.shape[1]
    if tokens and not bool(((slots >= -1) & (slots < cache_slots)).all()):
        raise ValueError("slots: expected -1 or an index inside the cache")
    if q is not None:
        q.copy_(_rotate(q, cos, sin))
    kept = slots >= 0
    where = slots[kept]
    for x, cache, scale in ((_rotate(k, cos, sin), k_cache, k_scale), (v, v_cache, v_scale)):
        flat = cache.view(cache_slots, heads, dim)
        if scale is None:
            flat[where] = x[kept]
        else:
            x = x[kept].contiguous()
            codes, scales = x.new_empty(x.shape, dtype=torch.int8), x.new_empty((*x.shape[:-1], 1))
            _quantize(x, codes, scales)
            flat[where] = codes
            scale.view(cache_slots, heads)[where] = scales.squeeze(-1)


def _quantize(x, codes, scales):
    amax = x.abs().amax(-1, keepdim=True)
    tiny = 127 * 2.0**-126
    s = torch.where(amax < tiny, torch.zeros_like(amax), amax / 127)
    usable = (s > 0) & torch.isfinite(s)
    q = torch.where(usable, torch.round(x / torch.where(usable, s, torch.ones_like(s))).clamp(-127, 127), 0.0)
    codes.copy_(q.to(torch.int8))
    scales.copy_(s)


def _rotate(x, cos, sin):
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([a * c - b * s, b * c + a * s], -1)


def attend_int8(q, k_cache, k_scale, v_cache, v_scale, page_table, lengths, mask, scale, out):
    batch, rows, heads, _ = q.shape
    page_size, kv_heads = k_cache.shape[1:3]
    for b in range(batch):
        keys = int(lengths[b])
        if keys < rows or keys > page_table.shape[1] * page_size:
            raise ValueError("lengths: expected at least the number of query rows and at most the pages of the request")
        pages = page_table[b, : -(-keys // page_size)].long()
        if pages.numel() and not bool(((pages >= 0) & (pages < k_cache.shape[0])).all()):
            raise ValueError("page_table: expected page numbers inside the cache")
        k = _gather(k_cache, k_scale, pages, keys)
        v = _gather(v_cache, v_scale, pages, keys)
        seen = torch.ones(rows, keys, dtype=torch.bool, device=q.device)
        own = keys - rows
        seen[:, own:] = torch.ones(rows, rows, dtype=torch.bool, device=q.device).tril() if mask is None else mask[b]
        for h in range(heads):
            kv = h // (heads // kv_heads)
            scores = (q[b, :, h].double() @ k[:, kv].T * scale).masked_fill(~seen, -torch.inf)
            out[b, :, h] = (torch.softmax(scores, -1) @ v[:, kv]).float()


def _gather(cache, scale, pages, keys):
    x = cache[pages].flatten(0, 1)[:keys].double()
    return x if scale is None else x * scale[pages].flatten(0, 1)[:keys, :, None].double()
