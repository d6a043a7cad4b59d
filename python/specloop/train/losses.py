"""What a draft's distribution is trained for: losses of one row, and their gradients in the draft's logits.

p is the target's distribution at T = 1, q the draft's. The draft says V' of the target's V ids (its cut vocabulary), so
q = 0 on the others while p has a mass 1 - m there, m = sum over the cut ids of p. Sums below are over the cut ids;
``alpha`` = sum of min(p, q) is exactly the probability that the target accepts a token of the draft. What each loss
makes of the mass outside is what its definition over all V ids says, where that is finite; only the forward KL is not,
see there. Everything is float32 (or wider, if the logits are), and a gradient in the logits z is that of
q = softmax(z): with s_v = dL/dq_v it is q_v (s_v - sum_u q_u s_u).

A loss takes :class:`Rows` and returns ``(values [R], gradient [R, V'])``.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch

HARDEST = 16  # wrong tokens that the target's is held against


class Rows:
    """R rows of both models.

    ``logits``: the draft's, [R, V']. ``log_p``: the target's log-probabilities of the cut ids [R, V'], whose
    exponentials sum to m <= 1. ``best``: int64 [R], the column of the target's argmax, -1 where it was cut.
    """

    def __init__(self, logits, log_p, best, p=None, mass=None):
        wide = logits.dtype if logits.dtype is torch.float64 else torch.float32
        self.log_q = torch.log_softmax(logits, 1, dtype=wide)
        self.q = self.log_q.exp()
        self.log_p, self.best = log_p, best
        self.p = log_p.exp() if p is None else p
        self.mass = self.p.sum(1) if mass is None else mass

    @cached_property
    def alpha(self):
        """sum of min(p, q): the probability that the target accepts."""
        return torch.minimum(self.p, self.q).sum(1)

    @cached_property
    def known(self):
        """Whether the draft can say the target's argmax, as a number."""
        return (self.best >= 0).to(self.q.dtype)

    @cached_property
    def agreed(self):
        """Whether the draft's likeliest id is the target's, as a number."""
        return (self.at_best(self.log_q) == self.log_q.amax(1)) * self.known

    def at_best(self, values):
        """The entries at the target's argmax, whatever where there is none."""
        return values.gather(1, self.best.clamp(min=0)[:, None])[:, 0]

    def through_softmax(self, slope):
        """The gradient in the logits of what has the gradient ``slope`` in q."""
        return self.q * (slope - dot(self.q, slope)[:, None])


def dot(a, b):
    """Inner products of rows."""
    return torch.linalg.vecdot(a, b)


def forward_kl(rows):
    """m KL(p / m || q) = sum p log((p / m) / q), Hinton et al. 2015 (arXiv 1503.02531) as distillation.

    Over all ids it would be infinite, as q is 0 where the target may go. It is taken over what can be said, with the
    weight that this has: a row counts as much as the target can be followed there. Gradient m q - p.
    """
    values = dot(rows.p, rows.log_p - rows.log_q) - rows.mass * rows.mass.clamp(min=1e-30).log()
    return values, torch.addcmul(-rows.p, rows.q, rows.mass[:, None])


def reverse_kl(rows):
    """KL(q || p) = sum q log(q / p), Gu et al. 2023 (arXiv 2306.08543). Finite: q is 0 on the ids that were cut.

    Gradient q (log(q / p) - KL).
    """
    ratio = rows.log_q - rows.log_p
    values = dot(rows.q, ratio)
    return values, rows.q * (ratio - values[:, None])


def jsd(rows):
    """Jensen-Shannon divergence, sum of p log(p / M) / 2 and q log(q / M) / 2 with M = (p + q) / 2, Agarwal et al. 2023
    (arXiv 2306.13649, beta = 1/2). An id that was cut has M = p / 2, so the mass outside adds (1 - m) log(2) / 2.

    dL/dq = log(q / M) / 2 + a constant.
    """
    log_m = torch.logaddexp(rows.log_p, rows.log_q) - math.log(2)
    to_q = rows.log_q - log_m
    values = (dot(rows.p, rows.log_p - log_m) + dot(rows.q, to_q) + (1 - rows.mass) * math.log(2)) / 2
    return values, rows.through_softmax(to_q / 2)


def tv(rows):
    """Total variation, 1 - alpha: the probability of a refusal itself (Zhou et al. 2023, arXiv 2310.08461).

    dL/dq = -1 where q < p, 0 elsewhere.
    """
    below = (rows.q < rows.p).to(rows.q.dtype)
    return 1 - rows.alpha, rows.q * (dot(rows.q, below)[:, None] - below)


def lk(rows):
    """lambda KL + (1 - lambda) (1 - alpha), lambda = exp(-3 alpha) without a gradient (arXiv 2602.23881): the forward
    KL where the two differ much, where the gradient of alpha is weak, and alpha itself where they are close.
    """
    (kl, kl_slope), (refused, tv_slope) = forward_kl(rows), tv(rows)
    share = torch.exp(-3 * rows.alpha)
    return torch.lerp(refused, kl, share), torch.lerp(tv_slope, kl_slope, share[:, None])


def cross_entropy(rows):
    """-log q(argmax p): what greedy decoding accepts. A row whose argmax was cut counts nothing."""
    gradient = rows.q * rows.known[:, None]
    gradient.scatter_add_(1, rows.best.clamp(min=0)[:, None], -rows.known[:, None])
    return -rows.at_best(rows.log_q) * rows.known, gradient


def contrastive(rows):
    """-log(q(y) / (q(y) + sum of q over the draft's ``HARDEST`` most likely other ids)), y = argmax p: InfoNCE (van den
    Oord et al. 2018, arXiv 1807.03748) with the draft's own worst mistakes as negatives. Zero where y was cut.
    """
    y = rows.best.clamp(min=0)[:, None]
    others = rows.log_q.scatter(1, y, -torch.inf)
    top = others.topk(min(HARDEST, others.shape[1] - 1), 1)
    among = torch.cat([rows.log_q.gather(1, y), top.values], 1)
    share = among.softmax(1) * rows.known[:, None]
    gradient = torch.zeros_like(rows.q).scatter_(1, torch.cat([y, top.indices], 1), share)
    gradient.scatter_add_(1, y, -rows.known[:, None])
    return (among.logsumexp(1) - among[:, 0]) * rows.known, gradient


LOSSES = {
    "kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "tv": tv,
    "lk": lk,
    "ce": cross_entropy,
    "contrastive": contrastive,
}


def mixed(rows, weights):
    """The weighted sum of several, ``weights`` by their names."""
    values = gradient = None
    for name, weight in weights.items():
        value, slope = LOSSES[name](rows)
        if values is None:
            values, gradient = weight * value, slope if weight == 1 else slope.mul_(weight)
        else:
            values, gradient = values + weight * value, gradient.add_(slope, alpha=weight)
    return values, gradient
