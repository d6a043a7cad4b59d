"""What the rules of ``verify`` and ``verify_tree`` have in common: one request's parameters and distributions."""

import math
from dataclasses import dataclass

import torch

from . import filters

# Bits of `flags`.
HARD_TARGET = 1  # an examined target row had NaN or +inf
NO_CANDIDATE = 2  # the row that had to give the last token has no candidate
BAD_VALUE = 4  # an argument that only a GPU could not check beforehand
BAD_DRAFT = 8  # an examined draft row was unusable


@dataclass(kw_only=True)
class Rules:
    """By what rule a request is judged, and how it is sampled."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    position: int
    rule: str = "token"
    theta: float | None = None
    typical: tuple = (0.09, 0.3)  # eps, delta

    @property
    def greedy(self):
        return self.temperature == 0

    def weights(self, row, decide):
        """Of a clean row, after temperature and filters; for a greedy request the argmax alone."""
        return filters.weights(row, self.temperature, self.top_k, self.top_p * decide.top_p, self.min_p * decide.min_p)

    def support(self, row, decide):
        """Where the filters let a token through; a greedy request's are taken at temperature 1."""
        one = self.temperature or 1.0
        return filters.weights(row, one, self.top_k, self.top_p * decide.top_p, self.min_p * decide.min_p) > 0

    def unfiltered(self, row):
        """softmax(l/T) of a clean row, T = 1 for a greedy request; NaN without a candidate."""
        return ((row - row.max()) / (self.temperature or 1.0)).softmax(0)

    def typical_bound(self, p):
        """min(eps, delta*exp(-H)), H = -sum p log(p + 1e-5): what p(x) has to exceed (Medusa, 2401.10774)."""
        eps, delta = self.typical
        return min(eps, delta * math.exp(float((p * (p + 1e-5).log()).sum())))


def read(target_row):
    """The clean row and its share of the flags."""
    row, suspicious = filters.clean(target_row)
    return row, HARD_TARGET * suspicious


def normalised(w):
    """w / sum w; zeros stay zeros."""
    return w / w.sum() if w.any() else w


def residual(p, q, r=1.0):
    """max(r*p - q, 0): what p has left after a refused draft of q; p itself where that is nothing."""
    left = (r * p - q).clamp(min=0)
    return left if left.any() else p


def chance(p, q, r):
    """S/(S + 1 - r), S = sum max(r*p - q, 0): with what chance a block that could go on ends here (Sun et al.)."""
    s = float((r * p - q).clamp(min=0).sum())
    going_on = s + (1.0 - r)  # in this order: with r = 1 it is s, however small
    return s / going_on if going_on > 0 else 1.0


def is_distribution(row):
    """Whether every entry can be a probability. Their sum is the caller's affair: rows are used as given."""
    return not (row.isnan() | row.isinf() | (row < 0)).any()


def at(parameter, b):
    """Request ``b``'s value of a parameter that is one number for all, or a tensor."""
    return parameter[b].item() if isinstance(parameter, torch.Tensor) else parameter


def bounds_are_sound(b, start, stop, requests, drafts):
    """Whether request ``b`` of ``requests`` may own the drafts (or nodes) start..stop: they follow each other from 0 to
    ``drafts``."""
    return 0 <= start <= stop <= drafts and (b > 0 or start == 0) and (b < requests - 1 or stop == drafts)


def rules_of(b, temperature, top_k, top_p, min_p, seed, position, rule, theta, typical):
    """The :class:`Rules` of request ``b`` as keyword arguments; None if a parameter is bad (possible on a GPU only)."""
    temp, p, least, bound = at(temperature, b), at(top_p, b), at(min_p, b), at(theta, b)
    if not (0 <= temp < math.inf and p >= 0 and least <= 1 and (bound is None or bound == bound)):
        return None
    return {
        "temperature": temp, "top_k": at(top_k, b), "top_p": p, "min_p": least,
        "seed": 0 if seed is None else int(seed[b]), "position": 0 if position is None else int(position[b]),
        "rule": rule, "theta": bound, "typical": typical,
    }  # fmt: skip


def changes(run, exact, shifts):
    """Whether a decision that is moved a little changes what ``run(decide)`` returns."""
    expected = run(exact)
    return any(run(shift) != expected for shift in shifts)
