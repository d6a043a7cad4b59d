"""The interpreted kernels give the tokens of the reference."""

import sys

import pytest
import torch

import device_calls
import specdec_kernels as sk
import specdec_kernels.reference.sample
import specdec_kernels.reference.verify
import specdec_kernels.reference.verify_tree
from specdec_kernels import registry
from specdec_kernels.verify import RULES as VERIFY_RULES
from specdec_kernels.verify_tree import RULES as TREE_RULES
from verify_cases import bounds, captured, keys, random_call, same

REFERENCE = {name: sys.modules[f"specdec_kernels.reference.{name}"] for name in ("verify", "verify_tree", "sample")}
BAD_VALUE = 4
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy on inf - inf and the like


def agrees(function, *args, **options):
    """Whether both give the same; False where only a comparison too close to call differs."""
    before = [a.clone() for a in args]
    with sk.use_backend("reference"):
        want, normalised = captured(function, *args, **options)
    with sk.use_backend("triton"):
        got = function(*args, **options)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(args, before, strict=True))
    if isinstance(got, tuple) and not hasattr(got, "flags"):
        equal = torch.equal(got[0], want[0]) and torch.allclose(got[1], want[1], rtol=1e-6, atol=1e-6, equal_nan=True)
    else:
        equal = same(got, want) and torch.equal(got[0], want[0])
    if not equal:
        fragile = REFERENCE[function.__name__].fragile(*normalised)
        assert any(fragile), f"{got} instead of {want}; {options}"
    return equal


def all_agree(operation, numbers):
    """All of a list of random calls of the operation; one in a hundred may be fragile."""
    calls = [device_calls.MAKERS[operation](number) for number in numbers]
    fragile = sum(not agrees(function, *args, **options) for function, args, options in calls)
    assert fragile <= 1 + len(calls) // 100


def small(operation, rules):
    """Numbers of two random calls per rule, of at most two requests: every program costs some 10 ms."""
    found = {rule: [] for rule in rules}
    number = 0
    while any(len(numbers) < 2 for numbers in found.values()):
        _, (_, *_, bounds_), options = device_calls.MAKERS[operation](number)
        if len(bounds_) < 4 and len(found[options["rule"]]) < 2:
            found[options["rule"]].append(number)
        number += 1
    return [number for numbers in found.values() for number in numbers]


def test_verify_on_random_calls():
    all_agree("verify", small("verify", VERIFY_RULES))


def test_verify_tree_on_random_calls():
    all_agree("verify_tree", small("verify_tree", TREE_RULES))


def test_sample_on_random_calls():
    calls = [device_calls.sample(number) for number in range(40)]
    calls = [(args, options) for _, args, options in calls if args[0].shape[1] < 4000][:8]
    assert sum(not agrees(sk.sample, *args, **options) for args, options in calls) <= 1


@pytest.mark.slow
def test_verify_on_many_calls():
    all_agree("verify", range(1000, 1600))


@pytest.mark.slow
def test_verify_tree_on_many_calls():
    all_agree("verify_tree", range(1000, 1400))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_of_any_stride(dtype):
    rows = torch.randn(3, 300, generator=torch.Generator().manual_seed(1)).to(dtype)
    for target in (rows[:, 3:203], rows[:, :200], rows.flip(0)[:, 7:207]):
        assert agrees(sk.verify, target, torch.tensor([5, 7]), bounds([2]), top_p=0.9, **keys(1, 3))


@pytest.mark.parametrize("stride", [0, 300])
def test_rows_on_each_other_and_far_apart(stride):
    target = torch.randn(700).as_strided((3, 100), (stride, 1))
    assert agrees(sk.verify, target, torch.tensor([5, 7]), bounds([2]), **keys(1, 3))


@pytest.mark.parametrize(
    "options",
    [{"top_k": 3}, {"top_k": 5000}, {"top_p": 0.5}, {"top_p": 0.0}, {"top_k": 700, "top_p": 0.99}, {"min_p": 0.5}],
    ids=str,
)
def test_filters_find_their_cut_beyond_one_tile(options):
    """6000 ids are more groups than a tile, so that the floor is looked for; many entries are equal."""
    rows = torch.randn(2, 6000, generator=torch.Generator().manual_seed(2)).mul(4).round().div(4)
    for temperature in (0.3, 1.0):
        assert agrees(sk.sample, rows, temperature=temperature, **options, **keys(2, 9), return_logprobs=True)


def test_a_request_does_not_know_its_neighbours():
    *tensors, options = next(
        call for call in map(random_call, range(100)) if len(call[2]) == 4 and 64 < call[0].shape[1] < 1001
    )
    target, tokens, cu = tensors
    with sk.use_backend("triton"):
        together = sk.verify(*tensors, **options)
        for b, (start, stop) in enumerate(zip(cu.tolist(), cu.tolist()[1:], strict=False)):
            mine = {}
            for name, value in options.items():
                if name in ("draft_logits", "draft_probs", "draft_kind"):
                    value = value[start:stop]
                elif isinstance(value, torch.Tensor) and name != "draft_ids":
                    value = value[b : b + 1]
                mine[name] = value
            alone = sk.verify(target[start + b : stop + b + 1], tokens[start:stop], bounds([stop - start]), **mine)
            width = alone.tokens.shape[1]
            assert torch.equal(alone.tokens[0], together.tokens[b, :width])
            assert alone.flags[0] == together.flags[b]


def call_with(**changed):
    """A call of two requests with one normalised argument replaced, as only a GPU's tensors could hold it."""
    names = (
        "target_logits, draft_tokens, cu_drafts, draft_rows, draft_is_logits, draft_ids, draft_kind, temperature,"
        " top_k, top_p, min_p, seed, position, rule, theta, typical, tokens, num_accepted, logprobs, flags"
    )
    target = torch.randn(5, 70, generator=torch.Generator().manual_seed(0))
    with sk.use_backend("reference"):
        good, arguments = captured(sk.verify, target, torch.tensor([1, 2, 3]), bounds([1, 2]), **keys(2, 1))
    given = dict(zip(names.split(", "), arguments, strict=True))
    given |= {name: torch.full_like(given[name], -7) for name in ("tokens", "num_accepted", "flags")} | changed
    with sk.use_backend("triton"):
        registry.call("verify", "cpu", *given.values())
    return good, given


@pytest.mark.parametrize(
    "changed",
    [
        {"temperature": torch.tensor([1.0, torch.nan])},
        {"temperature": torch.tensor([1.0, torch.inf])},
        {"temperature": torch.tensor([1.0, -1.0])},
        {"top_p": torch.tensor([1.0, -0.5])},
        {"top_p": torch.tensor([1.0, torch.nan])},
        {"min_p": torch.tensor([0.0, 1.5])},
        {"draft_tokens": torch.tensor([1, 2, 70])},
        {"draft_tokens": torch.tensor([1, -2, 3])},
        {"draft_tokens": torch.tensor([1, 2**40, 3])},
        {"cu_drafts": torch.tensor([0, 1, 4], dtype=torch.int32)},
        {"cu_drafts": torch.tensor([0, 1, 0], dtype=torch.int32)},
        {"cu_drafts": torch.tensor([0, 1, 2], dtype=torch.int32)},  # one draft is nobody's
        {"cu_drafts": torch.tensor([0, 1, 2**31 - 1], dtype=torch.int32)},
    ],
    ids=str,
)
def test_a_bad_value_is_flagged_and_concerns_its_request_only(changed):
    good, given = call_with(**changed)
    assert given["flags"].tolist() == [int(good.flags[0]), BAD_VALUE]
    assert given["tokens"][0].tolist() == good.tokens[0].tolist()
    assert given["tokens"][1].tolist() == [-1] * 3 and given["num_accepted"][1] == 0


TREE = {"tree_tokens": [1, 2, 3, 1, 2], "parents": [-1, -1, 0, -1, 0]}  # of two requests with 3 and 2 nodes


@pytest.mark.parametrize(
    "changed",
    [
        {"tree_tokens": [1, 2, 3, 1, 70]},
        {"tree_tokens": [1, 2, 3, -2, 2]},
        {"tree_tokens": [1, 2, 3, 2**40, 2]},
        {"tree_tokens": [1, 2, 3, 2, 2], "parents": [-1, -1, 0, -1, -1]},  # equal siblings
        {"parents": [-1, -1, 0, 0, 0]},  # its own parent
        {"parents": [-1, -1, 0, 1, 0]},  # a cycle
        {"parents": [-1, -1, 0, -1, 2**31 - 1]},
        {"parents": [-1, -1, 0, -1, -2]},
        {"max_depth": 1},  # less than the deepest node
        {"cu_nodes": [0, 3, 6]},
        {"cu_nodes": [0, 3, 2]},
        {"cu_nodes": [0, 3, 4]},  # one node is nobody's
    ],
    ids=str,
)
def test_a_bad_tree_is_flagged_and_concerns_its_request_only(changed):
    """What only a GPU can hold. The first request gets a flat tree where the depth is what is wrong."""
    given = {**TREE, "cu_nodes": [0, 3, 5], "max_depth": 2, **changed}
    if given["max_depth"] == 1:
        given["parents"] = [-1, -1, -1, -1, 0]
    target = torch.randn(7, 70, generator=torch.Generator().manual_seed(0))
    tokens = torch.full((2, given["max_depth"] + 1), -7)
    path, counted, flags = torch.full((2, given["max_depth"]), -7).int(), torch.zeros(2).int(), torch.zeros(2).int()
    links = torch.tensor(given["parents"], dtype=torch.int32)
    cu = torch.tensor(given["cu_nodes"], dtype=torch.int32)
    with sk.use_backend("triton"):
        registry.call(
            "verify_tree", "cpu", target, torch.tensor(given["tree_tokens"]), links, cu, None, 1.0, 0, 1.0, 0.0,
            *keys(2, 1).values(), "token", None, (0.1, 0.1), path, tokens, counted, None, flags,
        )  # fmt: skip
    with sk.use_backend("reference"):
        good = sk.verify_tree(
            target[:4], torch.tensor([1, 2, 3]), links[:3], bounds([3]), max_depth=given["max_depth"], **keys(1, 1)
        )
    assert flags.tolist() == [0, BAD_VALUE] and counted.tolist() == [int(good.num_accepted[0]), 0]
    assert path.tolist() == [good.path[0].tolist(), [-1] * given["max_depth"]]
    assert tokens.tolist() == [good.tokens[0].tolist(), [-1] * (given["max_depth"] + 1)]


def test_the_interpreter_serves_only_those_who_ask():
    row = torch.zeros(1, 8)
    serving = [name for name, _ in registry.candidates("sample", "cpu")]
    assert "triton" not in serving
    with sk.use_backend("triton"):
        assert [name for name, _ in registry.candidates("sample", "cpu")] == ["triton"]
        assert sk.sample(row, temperature=0).tolist() == [0]
        with pytest.raises(sk.BackendUnavailable, match="triton: has no linear_f32"):
            sk.linear_f32(row, row)
