"""A tree's result depends on its own rows, parameters, seed and position, and on nothing about where they lie."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import specdec_kernels as sk
from guard import guarded_like
from specdec_kernels.verify_tree import RULES
from verify_cases import FEW_BACKENDS, bounds, captured, keys, random_tree_call, running, same


@pytest.fixture(params=FEW_BACKENDS, autouse=True)
def backend(request):
    with running(request.param):
        yield request.param


def requests_of(number):
    """A random call cut into calls of one request each."""
    target, tokens, parents, cu, options = random_tree_call(number)
    for b, (start, stop) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)):
        mine = dict(options)
        for name, value in options.items():
            if isinstance(value, torch.Tensor):
                mine[name] = value[start:stop] if name == "draft_probs" else value[b : b + 1]
        yield target[start + b : stop + b + 1], tokens[start:stop], parents[start:stop], bounds([stop - start]), mine


def test_a_request_alone_equals_itself_in_a_batch():
    several = 0
    for number in range(40):
        *tensors, options = random_tree_call(number)
        whole = sk.verify_tree(*tensors, **options, max_depth=10)
        for b, (*own, mine) in enumerate(requests_of(number)):
            alone = sk.verify_tree(*own, **mine, max_depth=10)
            for name, part in zip(whole._fields, whole, strict=True):
                if part is not None:
                    assert torch.equal(part[b].nan_to_num(9), getattr(alone, name)[0].nan_to_num(9)), (number, b, name)
            several += b
    assert several > 10


def test_where_tensors_lie_changes_nothing():
    """Any stride, parameters and inputs of other integer types, and inputs between forbidden pages."""
    for number in range(24):
        target, tokens, parents, cu, options = random_tree_call(100 + number)
        expected = sk.verify_tree(target, tokens, parents, cu, **options)
        wide = torch.zeros(target.shape[0], target.shape[1] + 5, dtype=target.dtype)[:, 3:-2].copy_(target)
        twice = torch.stack([tokens, tokens], 1)[:, 0]
        assert same(sk.verify_tree(wide, twice, parents.long(), cu, **options), expected)
        for at in ("start", "end"):
            fenced = [guarded_like(x, at=at) for x in (target, tokens, parents, cu)]
            mine = {k: guarded_like(v, at=at) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
            assert same(sk.verify_tree(*fenced, **mine), expected)


@pytest.mark.parametrize("rule", RULES)
def test_outputs_are_written_to_their_ends_and_no_further(rule, backend):
    for number in range(12):
        *tensors, options = random_tree_call(200 + number, rule)
        expected, arguments = captured(sk.verify_tree, *tensors, **options)
        for at in ("start", "end"):
            outputs = [None if x is None else guarded_like(torch.full_like(x, 77), at=at) for x in arguments[-5:]]
            sk.registry.call("verify_tree", "cpu", *arguments[:-5], *outputs)
            assert same(sk.TreeVerdict(*outputs), expected)


def test_rows_that_no_rule_examines_may_hold_anything():
    """Below an absent node, and top-down below a node that was refused."""
    torch.manual_seed(0)
    target = torch.randn(6, 130)
    tokens, parents = torch.tensor([3, -1, 5, 7, 9]), torch.tensor([-1, -1, 1, 2, 0])
    target[0, 3] = -torch.inf  # node 0 is refused
    options = {"draft_probs": torch.full((5, 130), 1 / 130), "return_logprobs": True, "theta": 0.5, **keys(1)}
    for rule in RULES:
        clean = sk.verify_tree(target, tokens, parents, bounds([5]), rule=rule, **options)
        dirty = target.clone()
        for node in [1, 2, 3] if rule == "traversal" else range(5):
            dirty[1 + node] = torch.nan
        again = sk.verify_tree(dirty, tokens, parents, bounds([5]), rule=rule, **options)
        assert same(again, clean) and clean.flags.tolist() == [0]


def test_several_python_threads_at_once(backend):
    calls = [random_tree_call(number) for number in range(2000, 2016)]
    run = lambda call: sk.verify_tree(*call[:4], **call[4])
    expected = [run(call) for call in calls]

    def work(_):
        with sk.use_backend("reference" if backend == "reference" else "cpu"):
            return [run(call) for call in calls]

    with ThreadPoolExecutor(3) as pool:
        for results in pool.map(work, range(3)):
            assert all(same(a, b) for a, b in zip(results, expected, strict=True))
