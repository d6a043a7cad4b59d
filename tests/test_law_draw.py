"""The law of a single draw: with u integrated instead of drawn, and over many groups of ids with the real generator."""

import itertools

import pytest
import scipy.stats
import torch

import specdec_kernels as sk
from specdec_kernels.reference import draws
from verify_cases import BACKENDS, running


def test_pick_inside_a_group_has_the_weights_as_its_law(monkeypatch):
    weights, steps = torch.tensor([0.0, 0.3, 0.0, 0.5, 0.2, 0.0], dtype=torch.float64), 4_000
    count = torch.zeros(6)
    for step in range(steps):
        u = (step + 0.5) / steps
        numbers = lambda *key, u=u: torch.tensor([0.5], dtype=torch.float64) if torch.is_tensor(key[-1]) else u
        monkeypatch.setattr(draws, "uniform", numbers)
        count[draws.draw(weights, 0, 0, 2, 0, draws.Exact())] += 1
    assert (count / steps - weights).abs().max() < 2 / steps


def test_race_of_groups_has_the_masses_as_its_law(monkeypatch):
    """Two groups of masses a and b: the first wins iff E1/a < E2/b, which has probability a/(a + b)."""
    weights, steps = torch.zeros(128, dtype=torch.float64), 80
    weights[5], weights[70] = 0.3, 0.9
    wins = 0.0
    grid = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
    for u1, u2 in itertools.product(grid.tolist(), repeat=2):
        numbers = lambda *key, u=(u1, u2): torch.tensor(u, dtype=torch.float64) if torch.is_tensor(key[-1]) else 0.5
        monkeypatch.setattr(draws, "uniform", numbers)
        wins += draws.draw(weights, 0, 0, 2, 0, draws.Exact()) == 5
    assert wins / steps**2 == pytest.approx(0.25, abs=2 / steps)


@pytest.mark.parametrize("backend", BACKENDS)
def test_draws_over_many_groups_have_the_right_law(backend):
    """700 ids are eleven groups: race and pick together."""
    n = 60_000 if backend != "reference" else 1_500
    weights = torch.rand(700, generator=torch.Generator().manual_seed(0)).double() + 0.05
    p = weights / weights.sum()
    with running(backend):
        x = sk.sample(p.log().float().expand(n, 700), seed=torch.arange(n), position=torch.zeros(n).long())
    assert scipy.stats.chisquare(torch.bincount(x, minlength=700).double(), p * n).pvalue > 1e-5
