"""The best next tokens: against a full sort of the model's own row, with ties, and what is refused."""

import math

import pytest
import torch

import specdec_kernels
import specloop
import specloop.candidates
from scripted import Scripted
from specloop.drafts.likeliest import likeliest
from specloop.errors import ModelFault, OptionError, PromptError
from tiny_llama import CONFIG, build
from versions import PROMPT, pair_of


def sorted_row(model, ids):
    row = model.forward(ids, model.new_cache(len(ids)), last=1)[0]
    logs = torch.log_softmax(row.double(), -1).tolist()
    return sorted(enumerate(logs), key=lambda entry: (-entry[1], entry[0]))


@pytest.mark.parametrize("k", [1, 3, 10, CONFIG.vocab])
@pytest.mark.parametrize("ids", [[7], PROMPT, [(11 * i + 3) % CONFIG.vocab for i in range(200)]], ids=len)
def test_they_are_the_first_of_the_sorted_row(monkeypatch, ids, k):
    monkeypatch.setattr(specloop.candidates, "CHUNK", 64)
    model = build(seed=1)
    found = specloop.generate_candidates(model, ids, k)
    want = sorted_row(model, ids)[:k]
    assert [token for token, _ in found] == [token for token, _ in want]
    assert [log for _, log in found] == pytest.approx([log for _, log in want], abs=1e-5)
    assert all(type(token) is int and type(log) is float for token, log in found)


def test_a_pair_answers_for_its_target():
    with pair_of(1, draft="none", k=0) as pair:
        ids = pair.tokenizer.encode("hello")
        asked = specloop.generate_candidates(pair, "hello")
        assert asked == specloop.generate_candidates(pair, ids) == specloop.generate_candidates(pair.model, ids, k=3)
        assert len(asked) == 3 and asked[0][0] == pair.generate(ids, max_new_tokens=1).tokens[0]
        whole = [5] * pair.context  # as much as there is room for
        assert specloop.generate_candidates(pair, whole) == specloop.generate_candidates(pair.model, whole)


def test_ties_go_to_the_lower_id():
    model = Scripted(lambda prefix: [1.0, 3.0, 2.0, 3.0, 2.0, 2.0, 2.0], 7)
    for k in range(1, 8):
        assert [token for token, _ in specloop.generate_candidates(model, [0], k)] == [1, 3, 2, 4, 5, 6, 0][:k]


def test_ids_without_a_probability_do_not_come():
    model = Scripted(lambda prefix: [-math.inf, 0.0, -math.inf, 0.0], 4)
    assert dict(specloop.generate_candidates(model, [1], 4)) == pytest.approx({1: math.log(0.5), 3: math.log(0.5)})


def test_huge_logits_overflow_nothing():
    found = likeliest(torch.tensor([3e38, -3e38, 3e38]), None, 2)
    assert dict(found) == pytest.approx({0: math.log(0.5), 2: math.log(0.5)})


def test_an_infinite_logit_is_certain():
    """The first of them, as where it is sampled."""
    row = torch.tensor([1.0, math.inf, 2.0, math.inf])
    assert likeliest(row, None, 3) == [(1, 0.0)]
    assert int(specdec_kernels.sample(row[None], seed=torch.tensor([1]), position=torch.tensor([1]))) == 1


@pytest.mark.parametrize("temperature", [1e-38, 1e-3, 1e3])
def test_any_temperature(temperature):
    found = likeliest(torch.tensor([1.0, 3.0, 2.0]), None, 3, temperature)
    assert found[0][0] == 1 and not any(math.isnan(log) or log > 0 for _, log in found)


def test_a_cut_vocabulary_answers_in_ids_of_the_whole_one():
    model = Scripted(lambda prefix: [0.0, 2.0, 1.0], 3)
    model.vocab_size, model.draft_ids = 10, [2, 5, 9]
    model.forward = lambda tokens, cache, *, last: torch.tensor([[0.0, 2.0, 1.0]] * last)
    assert [token for token, _ in specloop.generate_candidates(model, [9], 3)] == [5, 9, 2]


BAD = {
    "k of 0": (PROMPT, 0, OptionError, "^k: "),
    "k beyond the vocabulary": (PROMPT, CONFIG.vocab + 1, OptionError, f"^k: .* to {CONFIG.vocab}, got"),
    "k no number": (PROMPT, "3", OptionError, "^k: "),
    "no ids": ([], 3, PromptError, "^context: "),
    "text for a model": ("hello", 3, PromptError, "^context: "),
    "an id out of range": ([1, CONFIG.vocab], 3, PromptError, "^context: "),
    "a negative id": ([-1], 3, PromptError, "^context: "),
    "no integers": ([1.0], 3, PromptError, "^context: "),
    "too long": ([1] * 10_000, 3, PromptError, "^context: "),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused(name):
    context, k, error, message = BAD[name]
    with pytest.raises(error, match=message):
        specloop.generate_candidates(build(), context, k)


def test_what_is_no_model_is_refused():
    with pytest.raises(OptionError, match=r"^draft_model: "):
        specloop.generate_candidates("smollm2", PROMPT)


@pytest.mark.parametrize("row", [[math.nan, 0.0], [-math.inf, -math.inf], [math.nan, math.inf]], ids=str)
def test_logits_without_a_candidate_are_a_fault(row):
    with pytest.raises(ModelFault, match="NaN"):
        specloop.generate_candidates(Scripted(lambda prefix: row, 2), [0], 1)
