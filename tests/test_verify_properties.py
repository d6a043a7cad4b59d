"""What holds for every call of verify and verify_tree, on every backend.

Every emitted id is in the vocabulary and has p > 0; emitted is an accepted prefix and one more token; greedy requests
follow the argmax; nothing but a request's own rows, parameters, seed and position has to do with what it emits; inputs
stay as they are. That the law is p is proven in test_law_*.py.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batches import batches
from specdec_kernels.reference import filters
from verify_cases import EMULATED, FEW_BACKENDS, running

HARD, EMPTY, BAD_VALUE, BAD_DRAFT = 1, 2, 4, 8
EXAMPLES = {"reference": 15, EMULATED: 10}  # others 30


@pytest.fixture(params=FEW_BACKENDS)
def backend(request):
    with running(request.param):
        yield request.param


@pytest.fixture(params=[False, True], ids=["chain", "tree"])
def tree(request):
    return request.param


def each(backend, tree, check, times=1):
    """Runs ``check`` on random batches, and a random source beside."""

    @settings(max_examples=times * EXAMPLES.get(backend, 30), deadline=None, derandomize=True, database=None)
    @given(batches(tree), st.randoms(use_true_random=False))
    def run(batch, rng):
        check(batch, rng)

    run()


def support(row, parameters, temperature):
    """Where p > 0, and what rounding may add to it."""
    top_p, min_p = parameters["top_p"] * (1 + 1e-5), parameters["min_p"] * (1 - 1e-5)
    return filters.weights(filters.clean(row)[0], temperature, parameters["top_k"], top_p, min_p) > 0


def path_of(batch, r, verdict, b):
    """The accepted nodes of request ``b``; a chain's are its first drafts."""
    n = verdict.num_accepted[b].item()
    if not batch.tree:
        return list(range(n))
    path = verdict.path[b].tolist()
    assert all(x == -1 for x in path[n:]) and all(0 <= j < len(r.tokens) for j in path[:n])
    assert all(r.parents[j] == parent for parent, j in zip([-1, *path], path[:n], strict=False))
    return path[:n]


def check_request(batch, r, verdict, b):
    vocabulary, temperature, flags = r.rows.shape[1], r.parameters["temperature"], verdict.flags[b].item()
    path = path_of(batch, r, verdict, b)
    count = len(path) + (flags & EMPTY == 0)
    tokens = verdict.tokens[b].tolist()
    assert flags & BAD_VALUE == 0 and flags < 16
    assert all(0 <= x < vocabulary for x in tokens[:count]) and all(x == -1 for x in tokens[count:])
    assert tokens[: len(path)] == [r.tokens[j] for j in path]
    rows = r.rows[[0, *[j + 1 for j in path]]]
    for i, x in enumerate(tokens[:count]):
        one = 1.0 if batch.rule == "threshold" and i < len(path) else temperature  # where greedy requests look
        assert support(rows[i], r.parameters, temperature or one)[x]
        assert verdict.logprobs[b, i].item() == pytest.approx(
            filters.clean(rows[i])[0].log_softmax(0)[x].item(), abs=1e-4, rel=1e-5
        )
    assert verdict.logprobs[b, count:].isnan().all()
    hard = lambda x: bool((x.isnan() | (x == torch.inf)).any())
    assert not hard(rows) or flags & HARD  # examined
    assert hard(r.rows) or not flags & HARD
    if flags & EMPTY:
        assert filters.argmax(filters.clean(rows[-1])[0]) < 0
    if temperature == 0 and batch.rule in ("token", "block", "traversal"):
        best = [filters.argmax(filters.clean(row)[0]) for row in rows]
        assert tokens[:count] == best[:count] and not flags & BAD_DRAFT
        assert bool(flags & HARD) == hard(rows)
        below = path[-1] if path else -1
        here = [j for j in range(len(r.tokens)) if (r.parents[j] if batch.tree else j - 1) == below]
        assert best[-1] < 0 or best[-1] not in [r.tokens[j] for j in here]  # or it would have been accepted


def rows_of(verdict, order):
    return [None if x is None else x[order].nan_to_num(7) for x in verdict]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def emitted_is_right(batch, _):
    function, tensors, options = batch.call()
    inputs = [*tensors, *(x for x in options.values() if isinstance(x, torch.Tensor))]
    before = [x.clone() for x in inputs]
    verdict = function(*tensors, **options)
    assert equal([x.nan_to_num(7) for x in before], [x.nan_to_num(7) for x in inputs])
    for b, r in enumerate(batch.requests):
        check_request(batch, r, verdict, b)


def depends_on_itself_alone(batch, rng):
    """The same alone, in another order, twice in a batch, with padding, and with rows further apart: bit for bit."""
    whole = batch.judge()
    n = len(batch.requests)
    for b in range(n):
        alone = batch.judge([batch.requests[b]], as_numbers=rng.random() < 0.5)
        assert equal(rows_of(alone, [0]), rows_of(whole, [b]))
    order = [rng.randrange(n) for _ in range(n + 2)]
    turned = batch.judge([batch.requests[b] for b in order])
    assert equal(rows_of(turned, range(n + 2)), rows_of(whole, order))
    for options in ({}, {"pad": rng.choice([1, 2])}, {"stride": rng.choice([1, 3, 64])}):
        assert equal(rows_of(batch.judge(**options), range(n)), rows_of(whole, range(n)))


def threads_change_nothing(isa):
    def check(batch, _):
        results = []
        for threads in (1, 2):
            with running(f"{isa}-{threads}"):
                results.append(rows_of(batch.judge(), range(len(batch.requests))))
        assert equal(*results)

    return check


def test_what_is_emitted_and_that_inputs_stay(backend, tree):
    each(backend, tree, emitted_is_right)


def test_a_request_knows_nothing_of_the_others(backend, tree):
    each(backend, tree, depends_on_itself_alone)


def test_threads_change_nothing(isa, tree):
    with running(f"{isa}-1"):
        each(isa, tree, threads_change_nothing(isa))


@pytest.mark.slow
def test_many(backend, tree):
    each(backend, tree, emitted_is_right, 10)
    each(backend, tree, depends_on_itself_alone, 10)
