"""The random decisions of verification: coins, and draws of a token from weights.

Each decision is a comparison, and a comparison may be so close that two correct backends decide it differently.
:class:`Exact` decides as the numbers say; :class:`Shifted` moves every comparison by a small relative amount. A call
whose tokens change under a shift is *fragile*: there backends may differ.
"""

import itertools

import torch

from .philox import COIN, uniform

GROUP = 64  # ids per group of a draw
PICK = 2**31  # counters of the pick inside a group start here
MARGIN = 1e-5  # relative; what a comparison may be off by between backends


class Exact:
    """Comparisons as they are."""

    top_p = min_p = 1.0  # factors for the filters' parameters

    def coin(self, u, bound):
        return u < bound

    def race(self, times):
        return int(times.argmin())

    def pick(self, running, bound):
        return running > bound

    def exceeds(self, value, bound):
        return value > bound

    def best(self, scores):
        """The index of the largest score, the first on ties."""
        return max(range(len(scores)), key=lambda i: (scores[i], -i))


class Shifted(Exact):
    """Every comparison moved: by a factor, and the race given to the runner-up where that one is close enough."""

    def __init__(self, top_p, min_p, coin, pick, runner_up):
        self.top_p, self.min_p, self.factors, self.runner_up = top_p, min_p, (coin, pick), runner_up

    def coin(self, u, bound):
        return u < bound * self.factors[0]

    def race(self, times):
        first = int(times.argmin())
        if not self.runner_up or len(times) < 2:
            return first
        others = times.clone()
        others[first] = torch.inf
        second = int(others.argmin())
        return second if times[second] * (1 - MARGIN) <= times[first] * (1 + MARGIN) else first

    def pick(self, running, bound):
        return running > bound * self.factors[1]

    def exceeds(self, value, bound):
        return value > bound * self.factors[0]

    def best(self, scores):
        first = super().best(scores)
        close = [i for i, s in enumerate(scores) if i != first and s >= scores[first] - MARGIN]
        return close[0] if self.runner_up and close else first


def shifts():
    """Every combination of shifts: two directions each for top_p, min_p, coins and picks, with and without the race."""
    both = (1 - MARGIN, 1 + MARGIN)
    for top_p, min_p, coin, pick, runner_up in itertools.product(both, both, both, both, (False, True)):
        yield Shifted(top_p, min_p, coin, pick, runner_up)


def accept(seed, position, i, q, p, decide):
    """Coin ``i`` of the round: accept a draft of probability ``q`` under ``p`` iff u*q < p."""
    return decide.coin(uniform(seed, position, COIN, i) * q, p)


def draw(weights, seed, position, stream, index, decide):
    """An id drawn from ``weights`` (>= 0, not all zero).

    Groups of 64 ids race: the time of a group of mass m > 0 is E/m, E = -log1p(-u); the earliest wins, the lowest on
    ties. Inside it, the first id whose running sum exceeds u*m; if rounding leaves none, the last of positive weight.
    """
    blocks = torch.nn.functional.pad(weights, (0, -len(weights) % GROUP)).view(-1, GROUP)
    mass = blocks.sum(1)
    live = mass.nonzero()[:, 0]
    times = -torch.log1p(-uniform(seed, position, stream, index, live)) / mass[live]
    group = int(live[decide.race(times)])
    inside = blocks[group]
    bound = uniform(seed, position, stream, index, group + PICK) * mass[group]
    over = decide.pick(inside.cumsum(0), bound).nonzero()
    chosen = over[0] if len(over) else inside.nonzero()[-1]
    return group * GROUP + int(chosen)
