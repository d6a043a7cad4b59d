"""Attention of chains that leave a text: what a draft sees when it has guessed on for some steps.

A chain c starts at a row s of its text and goes on below it. At depth i its query is that of position s + i; it attends
the text's own rows 0 .. s, whose keys k, v are those of the first step, and the chain's own rows s + 1 .. s + i, made
at depths 1 .. i (the training-time test of EAGLE-3, Li et al. 2025, arXiv 2503.01840). The chains of a text start in
consecutive rows, so all own rows of a depth lie side by side: row c of depth j belongs to chain c.

    softmax over [q_c . k_0, ..., q_c . k_s, q_c . own_1[c], ..., q_c . own_i[c]] / sqrt(D)

Texts differ in length. One after the other they need no padding and their scores stay in a processor's cache. A GPU
would rather have them together: there this is a dozen small launches per text and depth (never measured on one).
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Span(NamedTuple):
    """One text: how many rows it has, how many chains, and the row at which the first of them starts."""

    rows: int
    chains: int
    first: int


def attend(q, k, v, own, spans, dtype):
    """The attended values, float32 [chains, heads * D].

    ``q`` [chains, heads, D]; ``k``, ``v`` [rows, key heads, D]; ``own``: (k, v) of each depth, [chains, key heads, D];
    ``spans`` in the order of the rows. ``dtype``: of the products; the softmax is float32.
    """
    chains, rows = [span.chains for span in spans], [span.rows for span in spans]
    q = q.to(dtype).split(chains)
    k, v = k.to(dtype).split(rows), v.to(dtype).split(rows)
    own = [(a.to(dtype).split(chains), b.to(dtype).split(chains)) for a, b in own]
    one = lambda i: _attend(q[i], k[i], v[i], [(a[i], b[i]) for a, b in own], spans[i].first)
    return torch.cat([one(i) for i in range(len(spans))])


def _attend(q, k, v, own, first):
    n, heads, size = q.shape
    kv = k.shape[1]
    seen = first + n  # rows that the last chain sees
    k, v = k[:seen], v[:seen]
    grouped = q.view(n, kv, heads // kv, size)
    q = grouped.permute(1, 2, 0, 3).reshape(kv, -1, size)  # [kv, group * n, D]
    scores = (q @ k.permute(1, 2, 0)).view(kv, heads // kv, n, seen).float()
    hidden = torch.ones(n, seen, dtype=torch.bool, device=q.device).triu(first + 1)
    scores = scores.masked_fill_(hidden, -torch.inf)
    if own:  # [kv, group, n, 1] each
        scores = torch.cat(
            [scores, *((grouped * a[:, :, None]).sum(-1).permute(1, 2, 0)[..., None] for a, _ in own)], -1
        )
    weights = (scores * size**-0.5).softmax(-1)
    text = weights[..., :seen].to(q.dtype).reshape(kv, -1, seen)
    out = (text @ v.transpose(0, 1)).view(kv, heads // kv, n, size).permute(2, 0, 1, 3).float()
    for i, (_, b) in enumerate(own):
        out = out + weights[..., seen + i].permute(2, 0, 1)[..., None] * b[:, :, None].float()
    return out.reshape(n, heads * size)
