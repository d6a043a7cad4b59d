"""The exact law of whole texts with a feature head for a draft: it goes by what the target saw, the law by the target.

The target is a scripted model whose features tell the ids that it has read. The scripted head says nothing without the
right ones: where the target's are due it wants those of the text, and behind them its own.
"""

import pytest
import torch

from loop_laws import EXACT, FILTERS, ONE, PROMPT, WRONG, Cut, distance, loop_law, rows, seat_of, wanted
from scripted import Scripted, ScriptedCache
from specloop.drafts.chain import ChainDraft
from specloop.drafts.feature import FeatureDraft
from specloop.drafts.lookup import LookupDraft
from specloop.request import Sampling


def feature(ids):
    """A number for what was read."""
    return sum((i + 2) * (token + 1) for i, token in enumerate(ids)) % 97 + 1.0


class Target(Scripted):
    feature_size = 1


class Source:
    """The seat of the request whose cache the target made last."""

    def __init__(self, target):
        self.target = target

    @property
    def features(self):
        cache = self.target.caches[-1]
        told = [[feature(cache.ids[: p + 1])] for p in range(cache.length)]
        return torch.tensor(told + [[float("nan")]] * 4), cache.length


class Head(Cut):
    """Says the ids ``ids``, by what it consumed and the feature before."""

    reads_features = True

    def new_cache(self, capacity):
        cache = ScriptedCache(capacity)
        cache.given = None, 0
        return cache

    def forward(self, tokens, cache, *, last):
        features, reach = cache.given
        for p, token in enumerate(tokens, cache.length):
            known = cache.ids[:p]
            cache.ids.append(token)
            if 0 < p <= reach:
                assert float(features[p - 1]) == feature(known), f"the feature of position {p - 1}"
            elif p:
                assert len(tokens) == 1, "own features come one by one"
        made = [self.logits(cache.ids[: cache.length - last + 1 + i]) for i in range(last)]
        return torch.tensor(made, dtype=torch.float32).reshape(last, self.vocab_size)[:, self.columns]


def draft_on(target, head, sampling, **options):
    ids = torch.tensor(head.draft_ids, dtype=torch.int32)
    return FeatureDraft(
        seat_of(head), Source(target), head.vocab_size, sampling=Sampling(**(sampling or {})), ids=ids, **options
    )


def off(vocab_size, ids, k, length, sampling, *, make=None, eos_ids=(), **options):
    target, head = Target(rows(0, vocab_size), vocab_size, eos_ids), Head(rows(1, vocab_size), vocab_size, ids)
    head.eos_ids = target.eos_ids
    make = make or draft_on
    found = loop_law(target, lambda: make(target, head, sampling), k, length, sampling, **options)
    return distance(found, wanted(target, length, sampling))


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("ids", [[0, 1, 2], [0, 2], [1]], ids=str)
@pytest.mark.parametrize("k", [1, 2])
def test_texts_over_several_rounds(k, ids, rule):
    """What the head can't say comes from the target."""
    assert off(3, ids, k, 3, ONE, rule=rule) < EXACT


@pytest.mark.parametrize("name", FILTERS)
def test_temperatures_and_filters(name):
    assert off(3, [0, 2], 2, 3, FILTERS[name]) < EXACT


@pytest.mark.parametrize("ids", [[0, 2], [0, 1]], ids=str)
def test_an_end_that_the_head_may_not_know(ids):
    """Report F3: the text ends nevertheless, by the target's own token."""
    for rule in ("token", "block"):
        assert off(3, ids, 3, 3, ONE, eos_ids=[2], rule=rule) < EXACT


@pytest.mark.parametrize("options", [{"tree": 3}, {"tree": 1}, {"confidence": 0.5}], ids=str)
def test_trees_and_confidence(options):
    make = lambda *parts: draft_on(*parts, **options)
    assert off(3, [0, 2], 2, 3, ONE, make=make) < EXACT


def test_behind_a_lookup():
    make = lambda *parts: ChainDraft([LookupDraft(2), draft_on(*parts)])
    assert off(2, [0, 1], 2, 4, ONE, make=make) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("name", FILTERS)
def test_longer_texts(name, rule):
    assert off(3, [0, 2], 2, 4, FILTERS[name], rule=rule) < EXACT


def test_a_wrong_map_is_noticed():
    """Report F2: ids that are read by position, as if the vocabulary were whole."""

    def shifted(target, head, sampling):
        draft = draft_on(target, head, sampling)
        draft._map = torch.tensor([0, 1], dtype=torch.int32)
        propose = draft.propose

        def unmapped(k):
            found = propose(k)
            found.ids = None if found.logits is None else torch.tensor([0, 2], dtype=torch.int32)
            return found

        draft.propose = unmapped
        return draft

    assert off(3, [0, 2], 2, 3, ONE, make=shifted) > WRONG


def test_features_of_another_position_are_noticed(monkeypatch):
    """Report J: a row that is fed the feature of its own position, or of one too many before."""
    for shift in (-1, 1):

        def features(self, shift=shift):
            cache = self.target.caches[-1]
            told = [[feature(cache.ids[: max(p + 1 + shift, 0)])] for p in range(cache.length)]
            return torch.tensor([*told, [0.0]]), cache.length

        with monkeypatch.context() as patch:
            patch.setattr(Source, "features", property(features))
            target, head = Target(rows(0, 3), 3), Head(rows(1, 3), 3, [0, 2])
            draft = draft_on(target, head, ONE)
            target.new_cache(9).ids = list(PROMPT[:-1])
            with pytest.raises(AssertionError, match="the feature of position"):
                draft.begin(PROMPT)
