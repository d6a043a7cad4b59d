"""Calls of the attention family with everything that a caller may vary: dtypes, head sizes, strides, pages, slots."""

import torch

import specdec_kernels as sk

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def strided(shape, dtype, layout="block"):
    """A zeroed [pages, page, heads, dim] (or [pages, page, heads]) tensor, laid out as ``layout`` says.

    block: as written (page, token, head). head: every head's tokens together. page-last: pages inside tokens. gap: rows
    of a larger tensor, with room between heads, tokens and pages.
    """
    pages, page, heads, *last = shape
    if layout == "block":
        return torch.zeros(shape, dtype=dtype)
    if layout == "head":
        return torch.zeros(heads, pages, page, *last, dtype=dtype).movedim(0, 2)
    if layout == "page-last":
        return torch.zeros(page, heads, pages, *last, dtype=dtype).movedim(2, 0)
    assert layout == "gap"
    wide = torch.zeros(pages + 1, page + 2, heads + 1, *(n + 5 for n in last), dtype=dtype)
    return wide[(slice(1, None), slice(1, -1), slice(1, None), *(slice(3, 3 + n) for n in last))]


LAYOUTS = ("block", "head", "page-last", "gap")


def make_cache(pages, page, heads, dim, dtype, *, values=None, layout="block"):
    """(k_cache, k_scale, v_cache, v_scale), empty."""
    shape, scaled = (pages, page, heads), dtype is torch.int8
    scales = [strided(shape, torch.float32, layout) if scaled else None for _ in range(2)]
    k, v = strided((*shape, dim), dtype, layout), strided((*shape, values or dim), dtype, layout)
    return k, scales[0], v, scales[1]


def tables(tokens, dim):
    """cos and sin, f32 [tokens, dim / 2]."""
    angle = torch.arange(tokens)[:, None] * 100.0 ** -(torch.arange(dim // 2) / max(dim / 2, 1))
    return angle.cos(), angle.sin()


def lengths(*n):
    return torch.tensor(n, dtype=torch.int32)


class Filled:
    """A cache that ``rope_write_kv_int8`` filled with one request's tokens: what went in, where, and what came out."""

    def __init__(
        self,
        dtype,
        *,
        tokens=70,
        heads=3,
        q_heads=9,
        dim=64,
        values=None,
        page=16,
        x=torch.float32,
        layout="block",
        seed=0,
    ):
        g = torch.Generator().manual_seed(seed)
        values = values or dim
        used = -(-tokens // page)
        self.cache = make_cache(used + 2, page, heads, dim, dtype, values=values, layout=layout)
        self.table = torch.randperm(used + 2, generator=g)[:used].to(torch.int32)[None]
        self.slots = torch.tensor([int(self.table[0, i // page]) * page + i % page for i in range(tokens)])
        widths = [q_heads * dim, heads * dim, heads * values]
        row = torch.randn(tokens, sum(widths), generator=g).to(x)
        q, k, v = (
            part.unflatten(1, (n, -1)) for part, n in zip(row.split(widths, 1), (q_heads, heads, heads), strict=True)
        )
        self.q, self.k, self.v, self.angles = q, k, v, tables(tokens, dim)
        sk.rope_write_kv_int8(k, v, *self.angles, *self.cache, self.slots, q=q)

    def attend(self, rows, **options):
        tokens = len(self.slots)
        return sk.attend_int8(self.q[tokens - rows :][None], *self.cache, self.table, lengths(tokens), **options)

    def keys(self):
        """What the cache holds of the keys, dequantised, in token order: [tokens, heads, dim]."""
        return self._kept(0)

    def kept_values(self):
        return self._kept(2)

    def _kept(self, part):
        page = self.cache[0].shape[1]
        x, scale = (t if t is None else t[self.slots // page, self.slots % page] for t in self.cache[part : part + 2])
        return x.float() if scale is None else x * scale[..., None]


def plain(case, rows, scale=None):
    """The same attention over the unquantised, rotated keys, in float64 and without pages."""
    cos, sin = (t.double()[:, None] for t in case.angles)
    a, b = case.k.double().chunk(2, -1)
    k, v = torch.cat([a * cos - b * sin, b * cos + a * sin], -1), case.v.double()
    q = case.q[len(k) - rows :].double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("rhd,nhd->hrn", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(torch.ones(rows, len(k)).triu(len(k) - rows + 1).bool(), -torch.inf)
    return torch.einsum("hrn,nhd->rhd", scores.softmax(-1), v)[None]
