"""verify_tree on every backend gives what the reference gives, and on chains what verify gives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specdec_kernels as sk
from specdec_kernels.verify_tree import RULES
from verify_cases import FEW_BACKENDS, fragile_differences, random_call, random_tree_call, running


def compare(number, rule=None):
    *tensors, options = random_tree_call(number, rule)
    return fragile_differences(number, sk.verify_tree, *tensors, **options)


@pytest.mark.parametrize("rule", RULES)
def test_fixed_list(rule):
    fragile = sum(compare(number, rule) > 0 for number in range(100))
    assert fragile <= 1, f"{fragile} of 100 calls differ in a fragile comparison"


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(10**6, 2**31))
def test_random_calls(number):
    compare(number)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_many_calls(rule):
    fragile = sum(compare(number, rule) > 0 for number in range(10_000, 20_000))
    assert fragile <= 10, f"{fragile} of 10000 calls differ in a fragile comparison"


@pytest.mark.parametrize("backend", FEW_BACKENDS)
@pytest.mark.parametrize("rule", RULES)
def test_a_chain_equals_verify(rule, backend):
    accepted = 0
    for number in range(60):
        target, tokens, cu, options = random_call(number, "block" if rule == "traversal" else rule)
        if "draft_logits" in options or "draft_ids" in options or "draft_kind" in options:
            continue
        parents = torch.cat([torch.arange(n) - 1 for n in cu.diff().tolist()]).int()
        with running(backend):
            chain = sk.verify(target, tokens, cu, **options)
            tree = sk.verify_tree(target, tokens, parents, cu, **{**options, "rule": rule})
        for name in chain._fields:
            a, b = getattr(chain, name), getattr(tree, name)
            assert a is b is None or torch.equal(a.nan_to_num(9), b.nan_to_num(9)), (number, name)
        for b, n in enumerate(tree.num_accepted.tolist()):
            assert tree.path[b].tolist() == [*range(n), *[-1] * (tree.path.shape[1] - n)]
            accepted += n
    assert accepted > 20
