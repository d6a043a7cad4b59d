"""At T > 0 with penalties, bans and masks: the law of whole texts is that of plain sampling, exactly.

The loop runs with the reference's own rules; every way that its random decisions can go is followed and weighed
(laws.py), over all rounds of a text. The law that should come out is written down by the chain rule.
"""

import functools
import itertools
import math

import pytest
import torch

from laws import DRAFT, Branches
from naive_rows import TreeDraft, processed
from scripted import FunctionDraft, Scripted, law, request_for
from specdec_kernels import use_backend
from specloop.decode import decode
from specloop.drafts.base import Proposal
from specloop.options import check_request
from specloop.processors import Processor, Rows, make_processor

V, LENGTH, PROMPT = 3, 4, [0, 1, 0]


def alternate(ids):
    return [token for token in range(V) if token != (ids[-1] + ids[-2]) % V]


OPTIONS = {
    "penalties": {"repetition_penalty": 1.5, "frequency_penalty": 0.8, "presence_penalty": -0.3},
    "bans": {"bad_words": ((2, 1), (1, 2, 0), (1, 1)), "logit_bias": {0: 0.7}},
    "mask": {"allowed": alternate},
}
OPTIONS["all"] = {name: value for options in OPTIONS.values() for name, value in options.items()}
SHAPES = {  # rule, K, shape of the draft
    "chain of 1": ("token", 1, "chosen"),
    "chain of 3": ("token", 3, "chosen"),
    "block of 3": ("block", 3, "chosen"),
    "drawn chain": ("token", 2, "drawn"),
    "drawn block": ("block", 2, "drawn"),
    "tree": ("token", 2, (-1, -1, 0, 1)),
    "traversal": ("block", 2, (-1, -1, 0, 0, 1)),
}


def logits_after(ids):
    return [math.sin(5 * token + 3 * ids[-1] + len(ids)) for token in range(V)]


@functools.cache
def wanted(name, temperature):
    """The law of the texts, by the chain rule."""
    texts = {}
    for text in itertools.product(range(V), repeat=LENGTH):
        p = 1.0
        for n, token in enumerate(text):
            ids = [*PROMPT, *text[:n]]
            p *= law(processed(logits_after(ids), ids, len(PROMPT), **OPTIONS[name]), temperature)[token]
        texts[text] = p
    return texts


class Drawn:
    """A chain drawn from a law of its own, which knows nothing of the options."""

    name, timely = "drawn", True

    def __init__(self, branches, temperature):
        self.branches, self.temperature, self.ids = branches, temperature, []

    def begin(self, ids):
        self.ids = list(ids)

    def append(self, ids):
        self.ids.extend(ids)

    def outlook(self):
        return 0, 8

    def propose(self, k):
        rows, tokens = [], []
        for i in range(k):
            rows.append([math.cos(3 * token + 2 * sum(tokens) + len(self.ids)) for token in range(V)])
            q = torch.tensor(law(rows[-1], self.temperature), dtype=torch.float64)
            tokens.append(self.branches.draw(q, 0, len(self.ids), DRAFT, i))
        return Proposal(tokens, logits=torch.tensor(rows))


def guess(ids, j):
    return (sum(ids) + j) % V


def found(name, shape, temperature=1.0, kind=Processor):
    """The law of the texts that the loop makes."""
    rule, k, form = SHAPES[shape]

    def text(branches):
        model = Scripted(logits_after, V)
        if form == "drawn":
            draft = Drawn(branches, temperature)
        else:
            draft = TreeDraft(guess, V, form) if isinstance(form, tuple) else FunctionDraft(guess)
        draft.timely = True
        request = request_for(model, PROMPT, LENGTH, draft, k=k, rule=rule, sampling={"temperature": temperature})
        request.processor = kind(make_processor(check_request(**OPTIONS[name]), len(PROMPT), V, (), None).steps)
        list(decode(model, [request]))
        assert request.failure is None
        return tuple(request.ids[len(PROMPT) :])

    texts = {}
    with use_backend("reference"):
        for ids, probability, _ in Branches().outcomes(text):
            texts[ids] = texts.get(ids, 0.0) + probability
    return texts


def distance(found, want):
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-9)
    return 0.5 * sum(abs(found.get(text, 0.0) - p) for text, p in want.items())


LONG = [pytest.param(shape, marks=pytest.mark.slow) for shape in SHAPES if "drawn" in shape]


@pytest.mark.parametrize("shape", [*(shape for shape in SHAPES if "drawn" not in shape), *LONG])
@pytest.mark.parametrize("name", OPTIONS)
def test_texts_have_the_law_of_plain_sampling(name, shape):
    assert distance(found(name, shape), wanted(name, 1.0)) < 1e-6


@pytest.mark.parametrize("shape", ["chain of 3", "drawn chain", "drawn block", "tree"])
def test_at_another_temperature(shape):
    assert distance(found("all", shape, 0.7), wanted("all", 0.7)) < 1e-6


def test_there_are_many_texts():
    for name in OPTIONS:
        assert sum(p > 1e-3 for p in wanted(name, 1.0).values()) >= 8


class TooFew(Processor):
    """Rows behind the first see one id too few: what came before their draft's parent."""

    def rows(self, logits, ids, tokens, parents=None):
        seen = Rows(logits, ids, tokens, parents)
        for row in range(len(tokens) + 1):
            super().rows(logits[row : row + 1], ids + seen.paths[row][:-1], [])


class PerRound(Processor):
    """Every row sees the committed ids alone, as if things were counted once per round."""

    def rows(self, logits, ids, tokens, parents=None):
        for row in range(len(tokens) + 1):
            super().rows(logits[row : row + 1], ids, [])


@pytest.mark.parametrize("fault", [TooFew, PerRound])
@pytest.mark.parametrize("shape", ["chain of 3", "tree", "traversal"])
@pytest.mark.parametrize("name", ["penalties", "bans", "mask"])
def test_such_faults_would_be_found(name, shape, fault):
    assert distance(found(name, shape, kind=fault), wanted(name, 1.0)) > 1e-3
