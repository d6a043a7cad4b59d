"""verify, verify_tree and sample of the GPU kernels, run by the emulator: every wave size, run order and split.

The cases of test_verify_cases.py, test_sample.py, test_verify_layout.py and test_verify_tree_parity.py run on the
emulator, too (verify_cases.FEW_BACKENDS); here is what only a GPU backend has.
"""

import contextlib
import itertools
import math
import random
import sys

import pytest
import torch

import emulator
import specdec_kernels as sk
import specdec_kernels.reference.sample
import specdec_kernels.reference.verify
import specdec_kernels.reference.verify_tree
from specdec_kernels.reference.request import BAD_VALUE
from specdec_kernels.verify import RULES
from specdec_kernels.verify_tree import RULES as TREE_RULES
from verify_cases import bounds, captured, keys, random_call, random_tree_call, running, same

REFERENCE = {name: sys.modules[f"specdec_kernels.reference.{name}"] for name in ("verify", "verify_tree", "sample")}
# wave, run order, chunks: one launch (0), or a first one that surveys rows in that many parts
CONFIGURATIONS = [(32, "forward", 0), (64, "reverse", 3), (64, "random", 0), (32, "random", 1), (32, "reverse", 7)]


def compare(operation, *tensors, configurations=CONFIGURATIONS, **options):
    """Runs a call on the reference and the emulator; returns whether one differed in a fragile comparison."""
    before = [t.clone() for t in tensors]
    with running("reference"):
        expected, arguments = captured(operation, *tensors, **options)
    fragile = False
    for configuration in configurations:
        with emulator.serving(*configuration):
            got = operation(*tensors, **options)
        if not agree(got, expected):
            message = f"{options} on {configuration}: {got} instead of {expected}"
            assert any(REFERENCE[operation.__name__].fragile(*arguments)), message
            fragile = True
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, tensors, strict=True))
    return fragile


def agree(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return same(a, b) if hasattr(a, "flags") else all(map(torch.allclose, a, b, [1e-6] * 2, [1e-6] * 2, [True] * 2))


def some(number):
    """Two of the configurations, in turn."""
    return [CONFIGURATIONS[number % 5], CONFIGURATIONS[(number + 2) % 5]]


@pytest.mark.parametrize("rule", RULES)
def test_random_calls(rule):
    fragile = 0
    for number in range(300, 316):
        *tensors, options = random_call(number, rule)
        fragile += compare(sk.verify, *tensors, configurations=some(number), **options)
    assert fragile <= 1


@pytest.mark.parametrize("rule", TREE_RULES)
def test_random_trees(rule):
    fragile = 0
    for number in range(300, 316):
        *tensors, options = random_tree_call(number, rule)
        fragile += compare(sk.verify_tree, *tensors, configurations=some(number), **options)
    assert fragile <= 1


def test_random_samples():
    for number in range(5000, 5030):
        target, _, _, options = random_call(number, "token")
        options = {k: v for k, v in options.items() if not k.startswith("draft") and k != "rule"}
        rows = target[: len(options["seed"])]
        compare(sk.sample, rows, configurations=some(number), **options, stream=number % 4, index=number)


@pytest.mark.slow
@pytest.mark.parametrize("rule", sorted({*RULES, *TREE_RULES}))
def test_many_calls(rule):
    fragile = 0
    for number in range(20_000, 21_000):
        if rule in RULES:
            *tensors, options = random_call(number, rule)
            fragile += compare(sk.verify, *tensors, configurations=some(number), **options)
        if rule in TREE_RULES:
            *tensors, options = random_tree_call(number, rule)
            fragile += compare(sk.verify_tree, *tensors, configurations=some(number), **options)
    assert fragile <= 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_long_rows(dtype):
    """Several steps of a block per row, rows that share no boundary with a chunk, ties at the cut."""
    rows = torch.randn(4, 20_011, generator=torch.Generator().manual_seed(1)).mul(3).to(dtype)
    drafts, q = rows[:3].float().argmax(1), rows[:3] + 1
    for options in ({}, {"top_p": 0.9}, {"top_k": 500}, {"top_k": 3, "top_p": 0.6}, {"min_p": 0.01}):
        for temperature in (0.7, 1.5):
            options |= {"temperature": temperature, "return_logprobs": True, **keys(1, seed=4)}
            compare(
                sk.verify, rows, drafts, bounds([3]), configurations=[(32, "random", 0), (64, "forward", 5)], **options
            )
        compare(sk.verify, rows, drafts, bounds([3]), configurations=[(64, "random", 2)], draft_logits=q, **options)


def test_every_split_gives_the_same_bits():
    for number, rule in itertools.product(range(2), RULES):
        target, tokens, cu, options = random_call(500 + number, rule)
        options["return_logprobs"] = True
        results = []
        for wave, chunks in itertools.product((32, 64), (0, 1, 2, 13)):
            with emulator.serving(wave, "random", chunks):
                results.append(sk.verify(target, tokens, cu, **options))
        for a, b in itertools.product(results[:1], results[1:]):
            assert all(
                x is y is None or torch.equal(x.nan_to_num(9), y.nan_to_num(9)) for x, y in zip(a, b, strict=True)
            )


def test_a_small_batch_is_split_and_a_large_one_is_not():
    plan = emulator.compiled().plan_verify  # for 4 processors
    chunks, blocks, _ = plan(1, 5, 151_936, 0, -1, 0)
    assert chunks > 1 and blocks == 1
    chunks, blocks, size = plan(1024, 8, 151_936, 151_936, -1, 0)
    assert chunks == 0 and blocks == 8 and size < 1 << 20
    assert plan(3, 5, 151_936, 0, -1, 0)[0] == 0


# ---- bad values: what a GPU can't be asked for before the launch --------------------------------------------------


def corrupt(rng, tensor, values):
    if tensor.numel():
        tensor[rng.randrange(tensor.numel())] = rng.choice(values)


def per_request(value, requests, dtype):
    return value.clone() if isinstance(value, torch.Tensor) else torch.full((requests,), value, dtype=dtype)


@pytest.mark.parametrize("name", ["verify", "verify_tree"])
def test_bad_values_are_flagged(name):
    """The backend's own form of a call, spoilt: the reference says which requests can't be served."""
    flagged = 0
    for number in range(40):
        rng = random.Random(number)
        tree = name == "verify_tree"
        *tensors, options = (random_tree_call if tree else random_call)(number)
        if "draft_ids" in options:  # would be checked as well
            options = {k: v for k, v in options.items() if not k.startswith("draft_")}
        with running("reference"):
            _, arguments = captured(getattr(sk, name), *tensors, **options)
        arguments = list(arguments)
        requests, vocabulary = arguments[-1].shape[0], arguments[0].shape[1]
        tokens, cu = (1, 3) if tree else (1, 2)
        first = 5 if tree else 7  # temperature
        for i, dtype in enumerate([torch.float32, torch.int32, torch.float32, torch.float32]):
            arguments[first + i] = per_request(arguments[first + i], requests, dtype)
        for i in (tokens, cu, *([2] if tree else [])):
            arguments[i] = arguments[i].clone()
        spoil = rng.choice(["cu", "tokens", "temperature", "top_p", "min_p", "parents"])
        if spoil == "cu":
            corrupt(rng, arguments[cu], [-1, -(2**31), 2**31 - 1, len(arguments[tokens]) + 1, 0])
            if tree and (arguments[cu].diff() < 0).any():
                continue  # nodes of two requests: the kernel serves the first one alone
        elif spoil == "tokens":
            corrupt(rng, arguments[tokens], [-2, vocabulary, 2**40, -(2**63)])
        elif spoil == "temperature":
            corrupt(rng, arguments[first], [math.nan, math.inf, -1.0])
            if arguments[first + 4] is None:
                continue  # greedy: without keys
        elif spoil == "top_p":
            corrupt(rng, arguments[first + 2], [math.nan, -0.5, -math.inf])
        elif spoil == "min_p":
            corrupt(rng, arguments[first + 3], [math.nan, 1.5, math.inf])
        elif tree:
            corrupt(rng, arguments[2], [-2, 2**31 - 1, len(arguments[2]), 0, 1])
        outputs = 5 if tree else 4
        results = []
        for configuration in [None, *some(number)]:
            copies = [None if a is None else torch.empty_like(a) for a in arguments[-outputs:]]
            if configuration is None:
                getattr(REFERENCE[name], name)(*arguments[:-outputs], *copies)
            else:
                with emulator.serving(*configuration):
                    emulator.operations()[name](*arguments[:-outputs], *copies)
            results.append(copies)
        for got in results[1:]:
            for a, b in zip(got, results[0], strict=True):
                assert a is b is None or torch.allclose(a, b, rtol=1e-6, atol=1e-6, equal_nan=True), (number, spoil)
        flagged += int((results[0][-1] & BAD_VALUE).ne(0).sum())
    assert flagged > 10


def test_overlapping_trees_are_flagged():
    tokens, parents = torch.tensor([1, 2, 3, 4]), torch.full((4,), -1, dtype=torch.int32)
    outputs = [torch.empty(3, 1).int(), torch.empty(3, 2).long(), torch.empty(3).int(), None, torch.empty(3).int()]
    cu = torch.tensor([0, 3, 1, 4], dtype=torch.int32)
    options = [0.0, 0, 1.0, 0.0, None, None, "token", None, (0.09, 0.3)]
    for configuration in CONFIGURATIONS[:2]:
        with emulator.serving(*configuration):
            operation = emulator.operations()["verify_tree"]
            operation(torch.randn(7, 9), tokens, parents, cu, None, *options, *outputs)
        assert outputs[-1].tolist() == [0, BAD_VALUE, BAD_VALUE]


@pytest.mark.parametrize(
    ("cu", "flags"), [([1, 2, 4], [4, 0]), ([0, 2, 3], [0, 4]), ([1, 2, 3], [4, 4]), ([0, 2, 4], [0, 0])]
)
def test_drafts_of_nobody_are_flagged(cu, flags):
    """Bounds have to begin at 0 and to end at the number of drafts; the first and the last request answer for that."""
    tokens, cu = torch.tensor([1, 2, 3, 4]), torch.tensor(cu, dtype=torch.int32)
    options = [0.0, 0, 1.0, 0.0, None, None, "token", None, (0.09, 0.3)]
    for backend in ("reference", *CONFIGURATIONS[:2]):
        outputs = [torch.empty(2, 4).long(), torch.empty(2).int(), None, torch.empty(2).int()]
        path = torch.empty(2, 3).int()
        parents = torch.full((4,), -1, dtype=torch.int32)
        with emulator.serving(*backend) if backend != "reference" else contextlib.nullcontext():
            operations = emulator.operations() if backend != "reference" else None
            pick = lambda name, found=operations: found[name] if found else getattr(REFERENCE[name], name)
            pick("verify")(torch.zeros(6, 9), tokens, cu, None, False, None, None, *options, *outputs)
            assert outputs[-1].tolist() == flags, backend
            pick("verify_tree")(torch.zeros(6, 9), tokens, parents, cu, None, *options, path, *outputs)
            assert outputs[-1].tolist() == flags, backend


def test_bad_draft_ids_are_flagged():
    row, tokens, outputs = (
        torch.zeros(2, 5),
        torch.empty(1, 2).long(),
        [torch.empty(1).int(), None, torch.empty(1).int()],
    )
    for ids in ([0, 2, 2], [1, 0, 3], [-1, 2, 3], [0, 3, 5]):
        operation = emulator.operations()["verify"]
        operation(
            row, torch.tensor([2]), bounds([1]), torch.zeros(1, 3), True, torch.tensor(ids).int(), None,
            1.0, 0, 1.0, 0.0, *keys(1).values(), "token", None, (0.09, 0.3), tokens, *outputs,
        )  # fmt: skip
        assert outputs[-1].tolist() == [BAD_VALUE] and tokens.tolist() == [[-1, -1]]


def test_index_of_a_sample_is_checked():
    operation = emulator.operations()["sample"]
    tokens, index = torch.empty(3).long(), torch.tensor([-1, 2**24, 5]).int()
    operation(torch.zeros(3, 7), 1.0, 0, 1.0, 0.0, *keys(3).values(), 0, index, tokens, None)
    assert tokens[:2].tolist() == [-1, -1] and tokens[2] >= 0
