"""Numbers that come back in a later round: exactly, by enumeration of all decisions of all rounds.

One call can be right while a chain of calls is not: a number that was used in one round and comes back in another ties
the rounds together. The contract's keys (seed, round, stream, index) never come back; other keys do.
"""

import pytest

from laws import Branches, FixedModel, Setting, distance
from specdec_kernels.reference.philox import COIN, DRAFT, LAST

# Draft and target lie far apart, so that refusals are frequent. A row depends on the token before.
TARGET = FixedModel([0.2, 0.4, 0.4], [0.5, 0.2, 0.3], [0.35, 0.35, 0.3])
DRAFTER = FixedModel([0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8])
PAIR = {"target": FixedModel([0.75, 0.25], [0.35, 0.65]), "draft": FixedModel([0.3, 0.7], [0.7, 0.3])}

SETTINGS = {
    "token": Setting(target=TARGET, draft=DRAFTER, rule="token"),
    "block": Setting(target=TARGET, draft=DRAFTER, rule="block"),
    "tree token": Setting(**PAIR, rule="token", form="drawn", parents=(-1, -1, 0)),
    "tree traversal": Setting(**PAIR, rule="traversal", form="drawn", parents=(-1, -1, 0)),
    "tree of likeliest, token": Setting(**PAIR, rule="token", form="deterministic", parents=(-1, 0, -1)),
    "tree of likeliest, traversal": Setting(**PAIR, rule="traversal", form="deterministic", parents=(-1, 0, -1)),
}
KEYS = {
    "coins by the absolute position": lambda p, s, i: (p + i, s) if s == COIN else (p, s, i),
    "draft noise by the absolute position": lambda p, s, i: (p + i, s) if s == DRAFT else (p, s, i),
    "the same coins in every round": lambda p, s, i: (s, i) if s == COIN else (p, s, i),
    "the same draft noise in every round": lambda p, s, i: (s, i) if s == DRAFT else (p, s, i),
    "draft noise and last token share a stream": lambda p, s, i: (p, DRAFT if s == LAST else s, i),
    "draft noise and coins share a stream": lambda p, s, i: (p, DRAFT if s == COIN else s, i),
    "coins and last token share a stream": lambda p, s, i: (p, COIN if s == LAST else s, i),
    "one number per position for everything": lambda p, s, i: p + i,
}


def off(setting, key=None, length=3):
    """Total variation between the law of ``length`` tokens and the target's."""
    return distance(setting, length, Branches(key) if key else None, rounds_share_numbers=True)


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_right_keys(setting):
    assert off(SETTINGS[setting]) < 1e-9


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("setting", ["block", "tree token", "tree traversal"])
def test_other_keys_are_noticed(setting, keys):
    assert off(SETTINGS[setting], KEYS[keys]) > 5e-3


@pytest.mark.parametrize("keys", KEYS)
def test_other_keys_under_the_token_rule(keys):
    """A chain judged draft by draft looks at no coin behind the refusal: keys by absolute position do no harm."""
    harmless = keys in ("coins by the absolute position", "draft noise by the absolute position")
    distance = off(SETTINGS["token"], KEYS[keys], length=2)
    assert distance < 1e-9 if harmless else distance > 2e-2


def test_one_call_does_not_notice():
    """With keys by the absolute position the law of the first token is right, and everything else is not."""
    for keys in ("coins by the absolute position", "draft noise by the absolute position"):
        assert distance(SETTINGS["block"], 1, Branches(KEYS[keys]), rounds_share_numbers=True) < 1e-9
