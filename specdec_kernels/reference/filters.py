"""From a row of raw logits to its weights: hard inputs, temperature, top-k, top-p, min-p. Everything in float64."""

import torch


def clean(row):
    """The row in float64 after the rules for hard inputs, and whether it held a NaN or a +inf.

    NaN counts as -inf (never a candidate); a +inf makes the row a point mass on its first +inf.
    """
    row = row.double()
    infinite = row == torch.inf
    suspicious = bool(infinite.any() or row.isnan().any())
    if infinite.any():
        point = torch.full_like(row, -torch.inf)
        point[infinite.nonzero()[0]] = 0.0
        return point, suspicious
    return torch.where(row.isnan(), -torch.inf, row), suspicious


def argmax(row):
    """The lowest index among the largest entries of a clean row; -1 without a candidate."""
    best = row.max()
    return -1 if best == -torch.inf else int((row == best).nonzero()[0])


def one_hot(index, vocabulary):
    return torch.nn.functional.one_hot(torch.tensor(index, device="cpu"), vocabulary).double()


def weights(row, temperature, top_k, top_p, min_p):
    """Unnormalised probabilities of a clean row: w = exp((l - max)/T) inside the support, 0 outside.

    top-k and top-p keep a prefix of the order (logit descending, index ascending): the first k ids, and of these the
    shortest prefix that holds at least ``top_p`` of their mass. min-p keeps w >= min_p. Nothing is renormalised in
    between. Temperature 0 keeps the argmax alone. All zero if the row has no candidate.
    """
    kept = torch.zeros_like(row)
    best = argmax(row)
    if best < 0:
        return kept
    if temperature == 0:
        return one_hot(best, len(row))
    w = ((row - row[best]) / temperature).exp()
    order = torch.sort(row, descending=True, stable=True).indices
    if 0 < top_k < len(row):
        order = order[:top_k]
    if top_p < 1:
        mass = w[order].cumsum(0)
        enough = (mass >= top_p * mass[-1]).nonzero()
        order = order[: int(enough[0]) + 1] if len(enough) else order
    kept[order] = w[order]
    kept[w < min_p] = 0.0
    return kept
