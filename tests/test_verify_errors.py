"""Bad arguments of verify and sample: an error that names the argument, what was expected and what came."""

import importlib
import math
import random

import numpy as np
import pytest
import torch

import specdec_kernels as sk
from specdec_kernels import native, validate
from verify_cases import bounds, keys

NAN, INF = math.nan, math.inf
GOOD = {"target_logits": torch.zeros(5, 8), "draft_tokens": torch.tensor([1, 2, 3]), "cu_drafts": bounds([2, 1])}


def verify(**changes):
    arguments = {**GOOD, **keys(2), **changes}
    tensors = [arguments.pop(name) for name in GOOD]
    return sk.verify(*tensors, **arguments)


@pytest.mark.skipif(native.cpu is None, reason=f"needs the compiled module: {native.cpu_reason}")
def test_the_compiled_check_of_drafts_agrees_with_the_one_that_finds_the_words():
    module, rng, good = importlib.import_module("specdec_kernels.verify"), random.Random(0), 0
    for _ in range(2000):
        counts = [rng.choice([0, 1, 2, 3]) for _ in range(rng.randint(0, 3))]
        cu = bounds(counts).tolist()
        ids = [rng.choice([-1, 0, 4, 7, 7, 8, -2][: rng.choice([5, 5, 7])]) for _ in range(sum(counts))]
        if rng.random() < 0.3:
            cu[rng.randrange(len(cu))] += rng.choice([-1, 1, 2**31 - 9])
        tensors = torch.tensor(ids, dtype=torch.int64), torch.tensor(cu, dtype=torch.int32)
        compiled = native.cpu.longest_chain(tensors[1].data_ptr(), len(counts), tensors[0].data_ptr(), len(ids), 8)
        try:
            expected = module._check_drafts(ids, cu, 8)
        except ValueError:
            expected = -1
        assert compiled == expected, (ids, cu)
        good += expected >= 0
    assert 500 < good < 1900


def test_the_good_call_is_good():
    assert verify().flags.tolist() == [0, 0]


def probabilities(rows=3, columns=8):
    return torch.full((rows, columns), 1 / columns)


VALUES = [
    ("target_logits", {"target_logits": torch.zeros(6, 8)}),
    ("target_logits", {"target_logits": torch.zeros(5, 8, 1)}),
    ("target_logits", {"target_logits": torch.zeros(5, 0)}),
    ("target_logits", {"target_logits": torch.zeros(8, 5).t()}),
    ("target_logits", {"target_logits": torch.zeros(5, 8, requires_grad=True)}),
    ("target_logits", {"target_logits": torch.zeros(5, 8, device="meta")}),
    ("target_logits", {"target_logits": torch.zeros(5, 8).to_sparse()}),
    ("draft_tokens", {"draft_tokens": torch.tensor([1, 8, 3])}),
    ("draft_tokens", {"draft_tokens": torch.tensor([1, -2, 3])}),
    ("draft_tokens", {"draft_tokens": torch.tensor([[1, 2, 3]])}),
    ("cu_drafts", {"cu_drafts": torch.tensor([0, 2, 4], dtype=torch.int32)}),
    ("cu_drafts", {"cu_drafts": torch.tensor([1, 2, 3], dtype=torch.int32)}),
    ("cu_drafts", {"cu_drafts": torch.tensor([0, 4, 3], dtype=torch.int32)}),
    ("cu_drafts", {"cu_drafts": torch.tensor([], dtype=torch.int32)}),
    ("draft_probs", {"draft_probs": probabilities(), "draft_logits": probabilities()}),
    ("draft_probs", {"draft_probs": probabilities(rows=2)}),
    ("draft_logits", {"draft_logits": probabilities(columns=7)}),
    ("draft_logits", {"draft_logits": probabilities(8, 3).t()}),
    ("draft_ids", {"draft_ids": torch.tensor([0, 1]).int()}),
    ("draft_ids", {"draft_ids": torch.tensor([1, 0]).int(), "draft_probs": probabilities(columns=2)}),
    ("draft_ids", {"draft_ids": torch.tensor([1, 1]).int(), "draft_probs": probabilities(columns=2)}),
    ("draft_ids", {"draft_ids": torch.tensor([1, 8]).int(), "draft_probs": probabilities(columns=2)}),
    ("draft_ids", {"draft_ids": torch.tensor([-1, 1]).int(), "draft_probs": probabilities(columns=2)}),
    ("draft_ids", {"draft_ids": torch.tensor([]).int(), "draft_probs": torch.zeros(3, 0)}),
    ("draft_probs", {"draft_ids": torch.tensor([0, 1]).int(), "draft_probs": probabilities()}),
    ("draft_kind", {"draft_kind": torch.tensor([True, False, True])}),
    ("draft_kind", {"draft_kind": torch.tensor([True, True])}),
    ("temperature", {"temperature": -1.0}),
    ("temperature", {"temperature": NAN}),
    ("temperature", {"temperature": INF}),
    ("temperature", {"temperature": 1e39}),  # infinite in f32
    ("temperature", {"temperature": torch.tensor([1.0, NAN])}),
    ("temperature", {"temperature": torch.tensor([1.0, -0.5])}),
    ("temperature", {"temperature": torch.tensor([1.0, INF])}),
    ("temperature", {"temperature": torch.tensor([1.0])}),
    ("temperature", {"temperature": torch.tensor(1.0)}),
    ("top_k", {"top_k": torch.tensor([1, 2, 3])}),
    ("top_p", {"top_p": -0.1}),
    ("top_p", {"top_p": NAN}),
    ("top_p", {"top_p": torch.tensor([0.5, -1.0])}),
    ("min_p", {"min_p": 1.5}),
    ("min_p", {"min_p": NAN}),
    ("min_p", {"min_p": torch.tensor([0.5, NAN])}),
    ("seed", {"seed": None}),
    ("seed", {"seed": torch.tensor([1])}),
    ("position", {"position": None}),
    ("position", {"position": torch.tensor([1, -1])}),
    ("seed", {"seed": None, "temperature": torch.zeros(2)}),
    ("seed", {"temperature": 0, "seed": torch.tensor([1])}),
    ("position", {"temperature": 0, "position": torch.tensor([1, -1])}),
    ("temperature", {"temperature": 10**400}),
    ("top_p", {"top_p": -(10**400)}),
    ("max_drafts", {"max_drafts": 1}),
    ("rule", {"rule": "blocks"}),
    ("rule", {"rule": None}),
    ("rule", {"rule": "traversal"}),  # of trees
    ("theta", {"rule": "threshold"}),
    ("theta", {"rule": "threshold", "theta": NAN}),
    ("theta", {"rule": "threshold", "theta": torch.tensor([0.5, NAN])}),
    ("theta", {"rule": "threshold", "theta": torch.tensor([0.5])}),
    ("typical", {"rule": "typical", "typical": 0.3}),
    ("typical", {"rule": "typical", "typical": (0.1,)}),
    ("typical", {"rule": "typical", "typical": (0.1, None)}),
    ("typical", {"rule": "typical", "typical": (0.1, NAN)}),
    ("typical", {"rule": "typical", "typical": (-0.1, 0.3)}),  # would accept tokens of probability 0
    ("typical", {"rule": "typical", "typical": (0.1, -0.3)}),
    ("typical", {"rule": "typical", "typical": (torch.tensor([0.1, 0.2]), 0.3)}),
    # tensors on different devices
    ("draft_tokens", {"draft_tokens": torch.tensor([1, 2, 3], device="meta")}),
    ("cu_drafts", {"cu_drafts": bounds([2, 1]).to("meta")}),
    ("draft_probs", {"draft_probs": probabilities().to("meta")}),
    ("draft_logits", {"draft_logits": probabilities().to("meta")}),
    ("draft_ids", {"draft_ids": torch.arange(8).int().to("meta"), "draft_probs": probabilities()}),
    ("draft_kind", {"draft_kind": torch.ones(3, dtype=torch.bool, device="meta")}),
    ("temperature", {"temperature": torch.ones(2, device="meta")}),
    ("top_k", {"top_k": torch.ones(2, dtype=torch.int32, device="meta")}),
    ("seed", {"seed": torch.ones(2, dtype=torch.int64, device="meta")}),
    ("position", {"position": torch.ones(2, dtype=torch.int64, device="meta")}),
    ("theta", {"rule": "threshold", "theta": torch.ones(2, device="meta")}),
]

TYPES = [
    ("target_logits", {"target_logits": [[0.0]]}),
    ("target_logits", {"target_logits": torch.zeros(5, 8, dtype=torch.float64)}),
    ("draft_tokens", {"draft_tokens": torch.tensor([1.0, 2.0, 3.0])}),
    ("draft_tokens", {"draft_tokens": [1, 2, 3]}),
    ("cu_drafts", {"cu_drafts": torch.tensor([0, 2, 3])}),
    ("draft_probs", {"draft_probs": probabilities().double()}),
    ("draft_kind", {"draft_kind": torch.tensor([1, 1, 1])}),
    ("draft_ids", {"draft_ids": torch.arange(8), "draft_probs": probabilities()}),
    ("temperature", {"temperature": "hot"}),
    ("temperature", {"temperature": True}),
    ("temperature", {"temperature": None}),
    ("top_k", {"top_k": 1.5}),
    ("top_k", {"top_k": torch.tensor([1.0, 2.0])}),
    ("top_p", {"top_p": [0.5, 0.5]}),
    ("seed", {"seed": 5}),
    ("seed", {"seed": torch.tensor([1, 2], dtype=torch.int32)}),
    ("max_drafts", {"max_drafts": 2.0}),
    ("max_drafts", {"max_drafts": True}),
    ("theta", {"rule": "threshold", "theta": "low"}),
    ("theta", {"rule": "threshold", "theta": True}),
]


@pytest.mark.parametrize(("name", "changes"), VALUES, ids=lambda x: x if isinstance(x, str) else "")
def test_bad_values(name, changes):
    with pytest.raises(ValueError, match=rf"^{name}: expected .*(got|require grad)"):
        verify(**changes)


@pytest.mark.parametrize(("name", "changes"), TYPES, ids=lambda x: x if isinstance(x, str) else "")
def test_bad_types(name, changes):
    with pytest.raises(TypeError, match=rf"^{name}: expected .*got"):
        verify(**changes)


def test_unknown_rule_names_the_known_ones():
    with pytest.raises(ValueError, match="'token'"):
        verify(rule="leviathan")


@pytest.mark.parametrize("kind", [torch.ones(3, dtype=torch.bool), None])
def test_point_masses_need_no_rows(kind):
    assert verify(draft_kind=kind).flags.tolist() == [0, 0]


SAMPLE_VALUES = [
    ("logits", {"logits": torch.zeros(8)}),
    ("logits", {"logits": torch.zeros(2, 0)}),
    ("temperature", {"temperature": -0.5}),
    ("seed", {"seed": None}),
    ("position", {"position": torch.tensor([-1, 0])}),
    ("stream", {"stream": 256}),
    ("index", {"index": -1}),
    ("index", {"index": 2**24}),
    ("index", {"index": torch.tensor([0, -1])}),
    ("index", {"index": torch.tensor([0])}),
]


@pytest.mark.parametrize(("name", "changes"), SAMPLE_VALUES, ids=lambda x: x if isinstance(x, str) else "")
def test_bad_values_of_sample(name, changes):
    arguments = {"logits": torch.zeros(2, 8), **keys(2), **changes}
    with pytest.raises(ValueError, match=rf"^{name}: expected .*got"):
        sk.sample(arguments.pop("logits"), **arguments)


@pytest.mark.parametrize("name", ["index", "stream"])
@pytest.mark.parametrize("value", [1.0, None, True, "plain"])
def test_bad_types_of_sample(name, value):
    with pytest.raises(TypeError, match=rf"^{name}: expected .*got"):
        sk.sample(torch.zeros(2, 8), **keys(2), **{name: value})


def test_numbers_of_every_kind():
    plain = verify(temperature=torch.tensor([1.0, 0.0]), top_p=1.0, max_drafts=4, top_k=3)
    same = verify(
        temperature=torch.tensor([1, 0]), top_p=10**400, min_p=-(10**400), max_drafts=np.int64(4), top_k=np.int32(3)
    )
    assert torch.equal(plain.tokens, same.tokens) and plain.tokens.shape == (2, 5)
    row, keyed = torch.zeros(1, 99), {"seed": torch.tensor([1]), "position": torch.tensor([2])}
    numpy = sk.sample(row, index=np.int64(5), stream=np.int64(0), temperature=np.float32(1), **keyed)
    assert torch.equal(numpy, sk.sample(row, index=5, stream=0, **keyed))


def test_ids_that_were_good_are_looked_at_again_when_they_change():
    ids = torch.tensor([1, 4, 6], dtype=torch.int32)
    for _ in range(2):
        assert validate.ascending(ids, 7) and not validate.ascending(ids, 6)
    same = ids[:]
    same[1] = 6
    assert not validate.ascending(ids, 7)
    ids[1] = 5
    assert validate.ascending(ids, 7) and validate.ascending(ids.clone(), 7)
    with torch.inference_mode():  # whose tensors don't say when they were written to
        ids = torch.tensor([1, 4, 6], dtype=torch.int32)
        assert validate.ascending(ids, 7)
        ids[1] = 6
        assert not validate.ascending(ids, 7)
