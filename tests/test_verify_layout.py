"""A request's result depends on its own rows, parameters, seed and position, and on nothing about where they lie."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import specdec_kernels as sk
from guard import guarded
from verify_cases import (
    BACKENDS,
    EMULATED,
    FEW_BACKENDS,
    bounds,
    captured,
    emitted,
    judge,
    keys,
    random_call,
    running,
    same,
)


@pytest.fixture(params=FEW_BACKENDS, autouse=True)
def backend(request):
    torch.manual_seed(0)
    with running(request.param):
        yield request.param


def requests_of(number):
    """A random call cut into calls of one request each."""
    target, tokens, cu, options = random_call(number)
    for b, (start, stop) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)):
        mine = dict(options)
        for name, value in options.items():
            if isinstance(value, torch.Tensor) and name != "draft_ids":
                mine[name] = value[start:stop] if name.startswith("draft_") else value[b : b + 1]
        yield target[start + b : stop + b + 1], tokens[start:stop], bounds([stop - start]), mine


def test_a_request_alone_equals_itself_in_a_batch():
    several = 0
    for number in range(40):
        target, tokens, cu, options = random_call(number)
        whole = sk.verify(target, tokens, cu, **options, max_drafts=6)
        for b, (rows, drafts, own, mine) in enumerate(requests_of(number)):
            alone = sk.verify(rows, drafts, own, **mine, max_drafts=6)
            for name, part in zip(whole._fields, whole, strict=True):
                if part is not None:
                    assert torch.equal(part[b].nan_to_num(9), getattr(alone, name)[0].nan_to_num(9)), (number, b, name)
            several += b
    assert several > 20


def test_slots_can_be_permuted():
    rows, drafts = [torch.randn(3, 200) for _ in range(4)], [[1, 2], [3, 4], [5, 6], [7, 8]]
    seed, position = torch.tensor([7, 7, 42, -1]), torch.tensor([0, 5, 5, 9])
    straight = judge(rows, drafts, seed=seed, position=position)
    order = [2, 0, 3, 1]
    turned = judge([rows[i] for i in order], [drafts[i] for i in order], seed=seed[order], position=position[order])
    assert torch.equal(turned.tokens, straight.tokens[order])


def test_same_seed_same_tokens_other_seed_other_tokens():
    row = torch.zeros(1, 1000)
    a = judge([row] * 4, [[]] * 4, seed=torch.tensor([1111, 2222, 1111, 1111 + 2**40])).tokens[:, 0].tolist()
    assert a[0] == a[2] and len(set(a)) == 3
    position = torch.tensor([3, 4, 3, 3 + 2**33])
    a = judge([row] * 4, [[]] * 4, seed=torch.zeros(4).long(), position=position).tokens[:, 0].tolist()
    assert a[0] == a[2] and len(set(a)) == 3


def test_the_default_device_changes_nothing():
    for number in range(12):
        target, tokens, cu, options = random_call(number)
        rows, greedy = torch.randn(2, 70), {"temperature": 0}
        expected = sk.verify(target, tokens, cu, **options), sk.sample(rows, **greedy)
        with torch.device("meta"):
            got = sk.verify(target, tokens, cu, **options), sk.sample(rows, **greedy)
        assert same(got[0], expected[0]) and torch.equal(got[1], expected[1])


def test_width_changes_nothing():
    rows = torch.randn(3, 70)
    a, b = judge([rows], [[1, 2]]), judge([rows], [[1, 2]], max_drafts=9)
    assert emitted(a) == emitted(b) and tuple(b.tokens.shape) == (1, 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_any_row_stride_and_alignment(dtype):
    for pad, offset in ((64, 0), (1, 1), (3, 5)):
        wide = torch.randn(4, 333 + pad + offset).to(dtype)
        view = wide[:, offset : offset + 333]
        q = torch.randn(3, 400).to(dtype)[:, 3:336]
        drafts = view[:3].float().argmax(1)
        options = dict(temperature=0.7, top_p=0.9, draft_logits=q, return_logprobs=True, **keys(1))
        strided = sk.verify(view, drafts, bounds([3]), **options)
        dense = sk.verify(view.contiguous(), drafts, bounds([3]), **{**options, "draft_logits": q.contiguous()})
        assert same(strided, dense)
        assert torch.equal(sk.sample(view, **keys(4)), sk.sample(view.contiguous(), **keys(4)))


def test_one_row_for_all_requests():
    """Row stride 0."""
    row = torch.randn(1, 90)
    options = keys(6)
    assert torch.equal(sk.sample(row.expand(6, 90), **options), sk.sample(row.repeat(6, 1), **options))


def test_strided_parameters():
    rows = torch.randn(4, 50)
    twice = lambda x: torch.stack([x, x], 1).flatten()[::2]
    plain = dict(temperature=torch.rand(4), top_k=torch.arange(4) + 3, top_p=torch.rand(4), **keys(4, seed=3))
    assert torch.equal(sk.sample(rows, **plain), sk.sample(rows, **{k: twice(v) for k, v in plain.items()}))
    a = judge([torch.cat([rows, rows])[:3]], [[1, 2]])
    b = sk.verify(
        torch.cat([rows, rows])[:3], torch.tensor([1, 9, 2, 9])[::2], torch.tensor([0, 9, 2, 9]).int()[::2], **keys(1)
    )
    assert same(a, b)


def test_rows_more_than_two_to_the_31_elements_apart():
    distance = 2**30 + 13  # rows 2 and 3 lie beyond what 32 bits can address
    target = guarded((4, 100), torch.bfloat16, row_stride=distance)
    q = guarded((3, 100), torch.bfloat16, row_stride=distance)
    target.copy_(torch.randn(4, 100))
    q.copy_(torch.randn(3, 100))
    drafts = target[:3].float().argmax(1)
    for options in ({"temperature": 0}, dict(temperature=0.8, top_k=5, **keys(1))):
        far = sk.verify(target, drafts, bounds([3]), draft_logits=q, **options)
        near = sk.verify(target.clone(), drafts, bounds([3]), draft_logits=q.clone(), **options)
        assert same(far, near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("at", ["start", "end"])
@pytest.mark.parametrize("vocabulary", [1, 63, 64, 65, 2047, 2048, 2049 + 64])
def test_no_access_beyond_the_rows(vocabulary, at, dtype):
    target, q = guarded((3, vocabulary), dtype, at=at), guarded((2, vocabulary), dtype, at=at)
    target.copy_(torch.randn(3, vocabulary))
    q.copy_(target[:2])
    drafts = torch.full((2,), vocabulary - 1)
    rules = {"rule": "block"}, {"rule": "typical"}, {"rule": "threshold", "theta": 0.3}
    for options in ({"temperature": 0}, {"top_p": 0.8}, {"top_k": 3, "min_p": 0.01}, *rules):
        for form in ("draft_logits", "draft_probs"):
            rows = q if form == "draft_logits" else q.abs_()
            verdict = sk.verify(target, drafts, bounds([2]), **{form: rows}, return_logprobs=True, **keys(1), **options)
            assert verdict.tokens[0, 0] >= 0


@pytest.mark.skipif(len(BACKENDS) == 1, reason="no compiled module")
def test_threads_change_no_bit_and_instruction_sets_no_token(backend):
    if backend != "reference":
        return  # once is enough
    for number in range(30):
        target, tokens, cu, options = random_call(1000 + number)
        results = {}
        for name in BACKENDS[1:]:
            with running(name):
                results[name] = captured(sk.verify, target, tokens, cu, **options)[0]
        first = next(iter(results.values()))
        for name, result in results.items():
            assert same(result, first)
            one_thread = results[name.split("-")[0] + "-1"]
            for a, b in zip(result, one_thread, strict=True):
                assert a is None or torch.equal(a.nan_to_num(9), b.nan_to_num(9))


def test_long_rows_split_over_threads(backend):
    """Few requests and a large vocabulary: the threads share out the row."""
    if backend == "reference":
        return  # what the others are compared with
    rows = torch.randn(3, 70_003)
    drafts = rows.argmax(1).tolist()
    rows[0, drafts[0]] += 10
    dense = {"draft_logits": rows[:2] + 0.1 * torch.randn(2, 70_003)}
    rules = {"rule": "block", **dense}, {"rule": "token", **dense}, {"rule": "typical"}
    for options in ({"temperature": 0}, {"temperature": 0.9, "top_p": 0.95}, *rules):
        got = judge([rows], [drafts[:2]], **options)
        with running("reference"):
            assert same(got, judge([rows], [drafts[:2]], **options))


def test_flushing_of_subnormals_by_the_caller_changes_nothing(backend):
    """torch.set_flush_denormal(True) would make all of these logits equal."""
    if backend in ("reference", EMULATED):
        return  # torch's own arithmetic obeys the switch; a GPU is not reached by it
    rows = torch.arange(1, 101) * 1e-41
    options = {"temperature": torch.tensor([0.0, 1e-40]), **keys(2)}
    expected = sk.sample(rows.expand(2, 100), **options)
    assert expected[0] == 99
    if not torch.set_flush_denormal(True):
        return  # the processor has no such switch
    try:
        assert torch.equal(sk.sample(rows.expand(2, 100), **options), expected)
    finally:
        torch.set_flush_denormal(False)


def test_several_python_threads_at_once(backend):
    calls = [random_call(number) for number in range(2000, 2024)]
    run = lambda call: sk.verify(*call[:3], **call[3])
    expected = [run(call) for call in calls]

    def work(_):
        with running_backend(backend):
            return [run(call) for call in calls]

    with ThreadPoolExecutor(3) as pool:
        for results in pool.map(work, range(3)):
            assert all(same(a, b) for a, b in zip(results, expected, strict=True))


def running_backend(name):
    """The backend alone: instruction set and threads belong to the process and are set already."""
    return sk.use_backend("reference" if name == "reference" else "cpu")


def test_frozen_parameters_are_tensors_too():
    rows, frozen = torch.randn(4, 30), lambda *values: torch.nn.Parameter(torch.tensor(values), requires_grad=False)
    plain = judge(
        [rows[:2], rows[2:]], [[1], [2]], temperature=torch.tensor([0.5, 2.0]), top_p=torch.tensor([0.9, 1.0])
    )
    ours = judge([rows[:2], rows[2:]], [[1], [2]], temperature=frozen(0.5, 2.0), top_p=frozen(0.9, 1.0))
    assert same(ours, plain)
