"""Every backend gives the tokens of the reference; calls in which a comparison is too close to call are counted."""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specdec_kernels as sk
import specdec_kernels.reference.verify
from specdec_kernels.reference import draws
from specdec_kernels.verify import RULES
from verify_cases import BACKENDS, bounds, captured, fragile_differences, keys, logits_of, random_call, running, same

reference = sys.modules["specdec_kernels.reference.verify"]  # the package's attribute `verify` is the function


def compare(number, rule=None):
    *tensors, options = random_call(number, rule)
    return fragile_differences(number, sk.verify, *tensors, **options)


@pytest.mark.parametrize("rule", RULES)
def test_fixed_list(rule):
    fragile = sum(compare(number, rule) > 0 for number in range(80))
    assert fragile <= 1, f"{fragile} of 80 calls differ in a fragile comparison"


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(10**6, 2**31))
def test_random_calls(number):
    compare(number)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_many_calls(rule):
    fragile = sum(compare(number, rule) > 0 for number in range(10_000, 20_000))
    assert fragile <= 10, f"{fragile} of 10000 calls differ in a fragile comparison"


@pytest.mark.parametrize("top_p", [0.9, 1.0])
def test_large_vocabulary(top_p):
    target = torch.randn(4, 131_073, generator=torch.Generator().manual_seed(3))
    drafts = target[:3].argmax(1)
    options = dict(top_p=top_p, temperature=0.7, **keys(1, seed=5))
    with running("reference"):
        expected = sk.verify(target, drafts, bounds([3]), **options)
    for backend in BACKENDS[1:]:
        with running(backend):
            assert same(sk.verify(target, drafts, bounds([3]), **options), expected)


LOW = next(s for s in range(100) if draws.uniform(s, 0, draws.COIN, 0) < 0.1)  # a seed whose coin accepts readily


def fragile(p, draft, **options):
    target = torch.stack([logits_of(p)] * 2)
    with running("reference"):
        _, arguments = captured(sk.verify, target, torch.tensor([draft]), bounds([1]), **{**keys(1), **options})
    return reference.fragile(*arguments)[0]


def test_fragile_coin_is_recognised():
    u = draws.uniform(0, 0, draws.COIN, 0)
    assert fragile([u * (1 + 5e-6), 1 - u * (1 + 5e-6)], 0)
    assert fragile([u * (1 - 5e-6), 1 - u * (1 - 5e-6)], 0)
    assert not fragile([u * 1.001, 1 - u * 1.001], 0)


def test_fragile_top_p_is_recognised():
    assert fragile(
        [0.5, 0.3, 0.2], 1, top_p=0.5 + 1e-6, **keys(1, LOW)
    )  # does the prefix end after the first id or after the second?
    assert not fragile([0.5, 0.3, 0.2], 1, top_p=0.6, **keys(1, LOW))


def test_fragile_min_p_is_recognised():
    assert fragile([0.5, 0.5 * 0.4, 0.3], 1, min_p=0.4 - 1e-7, **keys(1, LOW))
    assert not fragile([0.5, 0.2, 0.3], 1, min_p=0.45, **keys(1, LOW))


def test_fragile_race_is_recognised():
    exact, shifted = draws.Exact(), list(draws.shifts())
    times = torch.tensor([1.0 + 5e-6, 1.0, 2.0], dtype=torch.float64)
    assert exact.race(times) == 1
    assert {s.race(times) for s in shifted} == {0, 1}
    assert {s.race(torch.tensor([1.001, 1.0])) for s in shifted} == {1}


def test_fragile_pick_is_recognised():
    running_sum, exact = torch.tensor([0.5, 1.0], dtype=torch.float64), draws.Exact()
    chosen = lambda decide: int(decide.pick(running_sum, 0.5 - 1e-6).nonzero()[0])
    assert chosen(exact) == 0
    assert {chosen(s) for s in draws.shifts()} == {0, 1}
