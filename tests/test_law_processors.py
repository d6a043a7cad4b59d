"""Lossless with penalties, bans and masks: the law of whole texts, exactly, for chains and trees of drafts that know
nothing of them. Each row that is judged has to be the one of the drafts before it.
"""

import math
from collections import Counter

import pytest

from loop_laws import PROMPT, distance, loop_law, model_draft, rows, wanted
from scripted import FunctionDraft, Scripted
from specloop.options import check_request
from specloop.processors import Processor, Rows, make_processor

EXACT, WRONG = 1e-6, 1e-3  # penalties are float32
ONE = {"temperature": 1.0}
V = 3


def penalised(row, answer):
    """Bias, then penalties, by their formulas."""
    row = [x + {1: 0.7}.get(t, 0.0) for t, x in enumerate(row)]
    for t in {*PROMPT, *answer}:
        row[t] = row[t] / 1.4 if row[t] > 0 else row[t] * 1.4
    said = Counter(answer)
    return [x - 0.5 * said[t] - 0.3 * (t in said) for t, x in enumerate(row)]


def not_twice(ids):
    return [t for t in range(V) if t != ids[-1]]


def masked(row, answer):
    return [x if t in not_twice([*PROMPT, *answer]) else -math.inf for t, x in enumerate(row)]


def banned(row, answer):
    """0 never, and 2 not after 1."""
    last = [*PROMPT, *answer][-1]
    return [-math.inf if t == 0 or (last, t) == (1, 2) else x for t, x in enumerate(row)]


def not_yet(row, answer):
    """No end before two ids."""
    return [-math.inf if t == 2 and len(answer) < 2 else x for t, x in enumerate(row)]


# name -> (options, the rows by hand, ids that end a text)
CASES = {
    "penalties": (
        {"logit_bias": {1: 0.7}, "repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.3},
        penalised,
        (),
    ),
    "mask": ({"allowed": not_twice}, masked, ()),
    "bans": ({"bad_words": [[0], [1, 2]]}, banned, ()),
    "no end yet": ({"min_new_tokens": 2}, not_yet, (2,)),
}


def drafts(eos):
    drafter = Scripted(rows(1, V), V, eos_ids=eos)
    return {
        "chosen": lambda: FunctionDraft(lambda prefix, j: (sum(prefix) + j) % V),
        "drawn": lambda: model_draft(drafter, V, ONE),
        "tree": lambda: model_draft(drafter, V, ONE, tree=4),
    }


def off(case, draft, rule="token", processor=lambda made: made, length=None):
    length = length or (3 if draft == "drawn" else 4)  # of which there are many more ways
    options, by_hand, eos = CASES[case]
    target = Scripted(rows(0, V), V, eos_ids=eos)
    checked = check_request(**options)
    make = lambda: processor(make_processor(checked, len(PROMPT), V, target.eos_ids, None))
    law = loop_law(target, drafts(eos)[draft], 2, length, ONE, processor=make, rule=rule)
    return distance(law, wanted(target, length, ONE, change=by_hand))


@pytest.mark.parametrize("draft", ["chosen", "drawn", "tree"])
@pytest.mark.parametrize("case", CASES)
def test_texts_have_the_law_of_plain_sampling(case, draft):
    assert off(case, draft) < EXACT


@pytest.mark.parametrize("draft", ["chosen", "drawn", "tree"])
@pytest.mark.parametrize("case", CASES)
def test_the_same_under_the_block_rule(case, draft):
    assert off(case, draft, "block") < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("case", CASES)
def test_longer_texts(case, rule):
    assert off(case, "drawn", rule, length=4) < EXACT


# ---- faults that the laws notice -------------------------------------------------------------------------------------


class OnlyTheFirstRow(Processor):
    """As if only the row of the committed ids were changed (report D1)."""

    def __init__(self, inner):
        self.inner = inner

    def rows(self, logits, ids, tokens, parents=None):
        self.inner.rows(logits[:1], ids, [], None if parents is None else [])


class AllRowsAlike(OnlyTheFirstRow):
    """As if the drafts before a row did not count (report D2)."""

    def rows(self, logits, ids, tokens, parents=None):
        for row in logits.split(1):
            self.inner.rows(row, ids, [], None if parents is None else [])


class OneTooFew(OnlyTheFirstRow):
    """As if the last draft before a row did not count."""

    def rows(self, logits, ids, tokens, parents=None):
        for row, path in zip(logits.split(1), Rows(logits, ids, tokens, parents).paths, strict=True):
            self.inner.rows(row, ids + path[:-1], [])


class AsAChain(OnlyTheFirstRow):
    """As if a node's neighbours came before it."""

    def rows(self, logits, ids, tokens, parents=None):
        self.inner.rows(logits, ids, tokens, None)


@pytest.mark.parametrize("draft", ["chosen", "drawn", "tree"])
@pytest.mark.parametrize("fault", [OnlyTheFirstRow, AllRowsAlike, OneTooFew, AsAChain])
def test_rows_that_are_changed_otherwise_are_noticed(draft, fault):
    if fault is AsAChain and draft != "tree":
        assert off("penalties", draft, processor=fault) < EXACT  # it is one
    else:
        assert off("penalties", draft, processor=fault) > WRONG
