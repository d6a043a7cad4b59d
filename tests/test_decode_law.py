"""Lossless at T > 0: the law of whole texts, over several rounds, is that of plain sampling.

First with ideal coins, by enumeration: every outcome of every draw is followed and weighed, so a slip of the loop (a
wrong row, a wrong rollback, a K that depends on what was drawn) shows exactly. Then with the real coins, by chi-square
over seeds: a number that comes back in a later round shows there and nowhere else.
"""

import itertools
import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import chisquare

import specloop.acceptance
from scripted import FunctionDraft, Scripted, law, request_for
from specloop.controller import Auto, Fixed
from specloop.decode import decode
from specloop.drafts.lookup import LookupDraft

VOCAB, LENGTH, PROMPT = 3, 4, [0, 1, 0]


def logits_after(prefix):
    return [math.sin(5 * token + 3 * prefix[-1] + len(prefix)) for token in range(VOCAB)]


def model():
    return Scripted(logits_after, VOCAB)


def wanted(temperature):
    """The law of the texts by the chain rule."""
    texts = {}
    for text in itertools.product(range(VOCAB), repeat=LENGTH):
        p = 1.0
        for n, token in enumerate(text):
            p *= law(logits_after([*PROMPT, *text[:n]]), temperature)[token]
        texts[text] = p
    return texts


DRAFTS = {
    "lookup": lambda: LookupDraft(1),
    "constant": lambda: FunctionDraft(lambda prefix, j: 1),
    "by prefix": lambda: FunctionDraft(lambda prefix, j: (sum(prefix) + j) % VOCAB),
}
CONTROLLERS = {
    "auto": lambda: Auto([1.0, 1.3, 1.4, 2.0, 2.1]),
    **{f"k={k}": lambda k=k: Fixed(k) for k in (0, 1, 2, 3, 5, 8)},
}


def text_of(draft, controller, **sampling):
    target = model()
    request = request_for(target, PROMPT, LENGTH, draft, controller, sampling=sampling)
    list(decode(target, [request]))
    return tuple(request.ids[len(PROMPT) :])


class Branches:
    """Runs something once per possible sequence of choices; ``pick`` is the choice, with its probabilities."""

    def __init__(self):
        self.waiting, self.path, self.trail, self.weight = [[]], [], [], 1.0

    def __iter__(self):
        while self.waiting:
            self.path, self.trail, self.weight = self.waiting.pop(), [], 1.0
            yield self

    def pick(self, weights):
        options = [i for i, w in enumerate(weights) if w > 0]
        n = len(self.trail)
        if n < len(self.path):
            choice = self.path[n]
        else:
            choice = options[0]
            self.waiting += [[*self.trail, other] for other in options[1:]]
        self.trail.append(choice)
        self.weight *= weights[choice] / sum(weights)
        return choice


def ideal_verify(branches, *, shift=0, redraw=False):
    """The token rule for point masses; ``shift`` and ``redraw`` are faults, to see that they are found."""

    def verify(logits, drafts, cu_drafts, *, temperature, **_):
        drafts, tokens = drafts.tolist(), []
        for i in range(len(drafts) + 1):
            p = law(logits[(i + shift) % len(logits)].tolist(), temperature)
            if i < len(drafts):
                x = drafts[i]
                if branches.pick([1 - p[x], p[x]]):
                    tokens.append(x)
                    continue
                if not redraw:
                    p[x] = 0.0
            tokens.append(branches.pick(p))
            break
        accepted = torch.tensor([len(tokens) - 1])
        return SimpleNamespace(
            tokens=torch.tensor([tokens]), num_accepted=accepted, flags=torch.tensor([0]), logprobs=None
        )

    return verify


def law_of_texts(monkeypatch, draft, controller, temperature, **faults):
    found, branches = Counter(), Branches()
    monkeypatch.setattr(specloop.acceptance, "verify", ideal_verify(branches, **faults))
    for branch in branches:
        text = text_of(draft(), controller(), temperature=temperature)
        found[text] += branch.weight
    return found


def distance(found, want):
    assert sum(found.values()) == pytest.approx(1)
    return max(abs(found[text] - p) for text, p in want.items())


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("controller", CONTROLLERS)
@pytest.mark.parametrize("draft", DRAFTS)
def test_texts_have_the_law_of_plain_sampling(monkeypatch, draft, controller, temperature):
    found = law_of_texts(monkeypatch, DRAFTS[draft], CONTROLLERS[controller], temperature)
    assert distance(found, wanted(temperature)) < 1e-6


@pytest.mark.parametrize("fault", [{"shift": 1}, {"redraw": True}])
def test_faults_are_found_by_enumeration(monkeypatch, fault):
    found = law_of_texts(monkeypatch, DRAFTS["by prefix"], CONTROLLERS["k=2"], 1.0, **fault)
    assert distance(found, wanted(1.0)) > 1e-3


SEEDS = 2000


def p_value(draft, controller, temperature):
    want = wanted(temperature)
    found = Counter(text_of(draft(), controller(), temperature=temperature, seed=seed) for seed in range(SEEDS))
    texts = sorted(want)
    return chisquare([found[t] for t in texts], [want[t] * SEEDS for t in texts]).pvalue


@pytest.mark.parametrize("controller", ["auto", "k=0", "k=2", "k=3"])
def test_real_coins_over_several_rounds(controller):
    assert p_value(DRAFTS["by prefix"], CONTROLLERS[controller], 1.0) > 1e-4


def test_a_number_used_in_two_rounds_is_found(monkeypatch):
    inner = specloop.acceptance.verify

    def stuck(*args, position, **kwargs):
        return inner(*args, position=torch.zeros_like(position), **kwargs)

    monkeypatch.setattr(specloop.acceptance, "verify", stuck)
    assert p_value(DRAFTS["by prefix"], CONTROLLERS["k=2"], 1.0) < 1e-6
