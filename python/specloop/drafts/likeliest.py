"""The best ids of a row of logits."""

from __future__ import annotations


def likeliest(row, ids, n: int, temperature: float = 1.0) -> list[tuple[int, float]] | None:
    """The ``n`` best of a row of raw logits [V] as (id, log-probability), best first, ties by lower id, none that is
    impossible; None if the row has a NaN or no candidate. A +inf is certain.

    ``ids``: what the row's columns stand for (a tensor), or None.
    """
    import torch

    row = row.float()
    top = row.max()
    if top.isnan() or top == -torch.inf:
        return None
    if top == torch.inf:
        row = torch.full_like(row, -torch.inf).index_fill_(0, row.argmax(), 0.0)  # of several the first, as in verify
        top = 0.0
    logs = torch.log_softmax((row - top) / temperature, -1)
    at = (logs >= logs.topk(min(n, len(logs))).values[-1]).nonzero()[:, 0]
    found = sorted(zip((-logs[at]).tolist(), at.tolist(), strict=True))[:n]
    return [(i if ids is None else int(ids[i]), -minus) for minus, i in found if minus != float("inf")]
