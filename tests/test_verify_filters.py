"""Temperature and filters: what others got wrong, each with its right answer, on every backend."""

import math

import pytest
import torch

import specdec_kernels as sk
from verify_cases import FEW_BACKENDS, MANY, bounds, emitted, judge, keys, logits_of, near, repeated, running, share

INF = math.inf


@pytest.fixture(params=FEW_BACKENDS, autouse=True)
def backend(request):
    torch.manual_seed(0)
    with running(request.param):
        yield request.param


# ---- temperature


def test_mixed_batch_keeps_greedy_exact():
    row = [-8.0, -3.0, -2.0, -1.0, 0.0, 9.0, 1.0, 2.0]
    options = {"temperature": torch.tensor([0.0, 0.8, 0.0]), "top_k": torch.tensor([0, 3, 2])}
    verdict = judge([[row, row]] * 3, [[5], [5], [0]], **options)
    assert emitted(verdict, 0) == [5, 5] and emitted(verdict, 2) == [5]


def test_greedy_ties_go_to_the_lowest_id():
    for temperature in (0, torch.tensor([0.0, 1.0])):
        verdict = judge([[[1.0, 1.0, 0.0]]] * 2, [[], []], temperature=temperature)
        assert emitted(verdict, 0) == [0]
    assert emitted(judge([[[3.0, 3.0, 1.0]] * 2], [[0]], temperature=0)) == [0, 0]
    assert emitted(judge([[[3.0, 3.0, 1.0]] * 2], [[1]], temperature=0)) == [0]


def test_negative_zero_ties_with_zero():
    row = [-1.0, -0.0, 0.0, -1.0]
    assert emitted(judge([[row]], [[]], temperature=0)) == [1]
    assert (repeated(30, [row], [], top_k=1).tokens == 1).all()


@pytest.mark.parametrize("temperature", [1e-6, 1e-38, 1e-45])
def test_tiny_temperature_does_not_overflow(temperature):
    verdict = judge([[[10.0, 300.0, 5.0]]], [[]], temperature=temperature)
    assert emitted(verdict) == [1] and verdict.flags.item() == 0


def test_huge_temperature_is_flat(backend):
    n = MANY.get(backend, 20_000)
    verdict = repeated(n, [[-1e30, 0.0, 1e30, -INF]], [], temperature=3e38)
    assert near(share(verdict.tokens[:, 0], 0), 1 / 3, n) and share(verdict.tokens[:, 0], 3) == 0


def test_extreme_finite_logits():
    big = torch.finfo(torch.float32).max
    assert emitted(judge([[[-big, big, 0.0]]], [[]], temperature=1.0)) == [1]
    assert emitted(judge([[[-big, -big]]], [[]], temperature=0)) == [0]


def test_temperature_is_applied_once(backend):
    n = MANY.get(backend, 20_000)
    verdict = repeated(n, [[0.0, math.log(4.0)]], [], temperature=2.0)
    assert near(share(verdict.tokens[:, 0], 0), 1 / 3, n)


# ---- filters


def support(p, backend, n=400, **options):
    tokens = repeated(MANY.get(backend, n), [logits_of(p).tolist()], [], **options).tokens[:, 0]
    return set(tokens.tolist())


def test_top_k_keeps_exactly_k_of_the_tied(backend):
    assert support([0.4, 0.3, 0.3, 0.0], backend, top_k=2) == {0, 1}
    assert support([0.25, 0.25, 0.25, 0.25], backend, top_k=3) == {0, 1, 2}
    assert support([0.1, 0.45, 0.0, 0.45], backend, top_k=1) == {1}


def test_top_p_is_the_shortest_prefix(backend):
    assert support([0.25] * 4, backend, top_p=0.5) == {0, 1}  # the mass equals top_p: enough
    assert support([0.3, 0.1, 0.1, 0.5], backend, top_p=0.8 - 1e-6) == {3, 0}
    assert support([0.3, 0.1, 0.1, 0.5], backend, top_p=0.8 + 1e-6) == {3, 0, 1}  # one of the tied, the lowest id
    assert support([0.5, 0.3, 0.15, 0.05], backend, top_p=0.6) == {0, 1}


def test_top_p_counts_the_mass_of_the_top_k_set(backend):
    p = [0.35, 0.25, 0.20, 0.05, 0.03, 0.12]
    assert support(p, backend, top_p=0.82) == {0, 1, 2, 5}
    assert support(p, backend, top_k=4, top_p=0.82) == {0, 1, 2}  # 0.80 of 0.92 is enough
    assert support(p, backend, top_k=4, top_p=0.88) == {0, 1, 2, 5}


def test_min_p_applies_to_verified_rows(backend):
    verdict = repeated(MANY.get(backend, 2000), [logits_of([0.90, 0.06, 0.04]).tolist()] * 2, [1], min_p=0.1)
    assert (verdict.tokens[:, 0] == 0).all()


def test_min_p_renormalises_nothing_before_top_p(backend):
    """top-p is taken of the whole row, min-p of what it leaves."""
    assert support([0.5, 0.2, 0.2, 0.1], backend, top_p=0.85, min_p=0.3) == {0, 1, 2}


def test_filtered_draft_is_never_emitted(backend):
    verdict = repeated(MANY.get(backend, 2000), [logits_of([0.5, 0.3, 0.2]).tolist()] * 2, [2], top_p=0.5)
    assert (verdict.tokens[:, 0] == 0).all()


@pytest.mark.parametrize("top_k", [-1, 0, 4, 5, 2**31 - 1, 2**40])
def test_top_k_off(top_k, backend):
    assert support([0.25] * 4, backend, top_k=top_k) == {0, 1, 2, 3}


def test_extremes_of_the_filters(backend):
    p = [0.2, 0.3, 0.3, 0.2]
    assert support(p, backend, top_p=0.0) == {1}  # never empty
    assert support(p, backend, min_p=1.0) == {1, 2}
    assert support(p, backend, top_k=1, top_p=0.0, min_p=1.0) == {1}
    assert support(p, backend, top_p=7.0, min_p=-1.0) == {0, 1, 2, 3}


def test_nucleus_of_a_large_vocabulary():
    """Which ids a large row keeps, against a sorted float64 row: near the end of the prefix, one by one.

    An id is in the support iff it is accepted as a draft of next to no q.
    """
    row = torch.randn(131_072, generator=torch.Generator().manual_seed(4))
    order = torch.sort(row, descending=True, stable=True).indices
    mass = row.double().softmax(0)[order].cumsum(0)
    last_inside = int((mass < 0.9 * (1 - 2e-5)).sum()) - 1
    first_outside = int((mass < 0.9 * (1 + 2e-5)).sum()) + 1
    assert first_outside - last_inside < 40
    near_the_end = [order[last_inside - i] for i in range(4)] + [order[first_outside + i] for i in range(4)]
    q = torch.zeros(1, len(row))
    for i, x in enumerate(near_the_end):
        q[0, x] = 1e-30
        verdict = sk.verify(row.expand(2, -1), x[None], bounds([1]), draft_probs=q, top_p=0.9, **keys(1))
        assert verdict.num_accepted.item() == (i < 4)


@pytest.mark.parametrize("count", [2047, 2048, 2049, 2100, 2112, 2113])
@pytest.mark.parametrize("options", [{"top_p": 0.999}, {"top_k": 2040}, {"min_p": 0.5}], ids=str)
def test_as_many_candidates_as_can_be_gathered(count, options):
    """Around the size of the cpu backend's buffer: what is kept, and how it weighs."""
    generator = torch.Generator().manual_seed(count)
    row = torch.full((4 * 64 * 64,), -20.0)
    row[torch.randperm(count, generator=generator)] = torch.rand(count, generator=generator) * -0.6
    tokens = repeated(2, [row.tolist()], [], **options).tokens
    with running("reference"):
        assert torch.equal(tokens, repeated(2, [row.tolist()], [], **options).tokens)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_bias_and_masks_reach_the_verified_rows(temperature):
    """Whatever a caller does to the logits holds for drafts as for the bonus."""
    rows = torch.zeros(2, 300)
    rows[:, 279] = 5.0 - 100.0
    verdict = repeated(50, rows, [279], temperature=temperature)
    assert (verdict.num_accepted == 0).all() and (verdict.tokens != 279).all()


def test_a_draw_is_no_argmax(backend):
    n = MANY.get(backend, 20_000)
    assert near(share(repeated(n, [logits_of([0.6, 0.4]).tolist()], []).tokens[:, 0], 1), 0.4, n)
