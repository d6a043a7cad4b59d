"""What the backends emit has the target's law: chi-square over whole sequences of rounds, and over single calls.

test_law_rounds.py proves the same of the reference, exactly; here the real generator and every backend take part.
Faults are put in, and are noticed: numbers that tie rounds together.
"""

import pytest
import torch

from laws import chain
from sequences import CHAINS, CROSSED, REPEATING, TREES, p_value, sequences
from specdec_kernels.reference.draws import PICK
from specdec_kernels.reference.philox import COIN, DRAFT, uniform
from verify_cases import BACKENDS, FEW_BACKENDS, MANY, running


def size(backend):
    """(Number of sequences, tokens of each); a backend that takes a millisecond per request can afford less."""
    return (100, 2) if backend in MANY else (4_000, 4)


RIGHT, WRONG = 1e-5, 1e-9  # p values
WAYS = [pytest.param(*way, id=" ".join(way)) for way in (*CHAINS, *TREES)]


@pytest.fixture(params=FEW_BACKENDS)
def backend(request):
    with running(request.param):
        yield request.param


@pytest.mark.parametrize(("rule", "form"), WAYS)
def test_whole_sequences(rule, form, backend):
    n, length = size(backend)
    assert p_value(sequences(n, length, rule, form), length) > RIGHT


@pytest.mark.parametrize("backend", FEW_BACKENDS[1:] or FEW_BACKENDS)
@pytest.mark.parametrize(("rule", "form"), WAYS)
def test_one_call(rule, form, backend):
    n = size(backend)[0]
    with running(backend):
        assert p_value(sequences(n, 1, rule, form, start=2**40), 1) > RIGHT


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("rule", "form"), WAYS)
def test_a_million_sequences(rule, form, backend, length):
    """A million per backend; of the reference, at a millisecond per request, ten thousand."""
    n, longest = (10_000, 3) if backend in MANY else (1_000_000, 4)
    length, chunk = min(length, longest), min(n, 100_000)
    with running(backend):
        parts = [sequences(chunk, length, rule, form, start=10**6 + i) for i in range(0, n, chunk)]
    assert p_value(torch.cat(parts), length) > RIGHT


FAULTS = {
    "draft noise from the stream of the last token": {"draft_stream": 2},
    "draft noise by the token's own position": {"draft_key": lambda position, i: (position + i, 0)},
    "the same draft noise in every round": {"draft_key": lambda position, i: (position * 0, i)},
    "the same coins and last tokens in every round": {"verify_position": torch.zeros_like},
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("rule", "form"), [("token", "draft_logits"), ("block", "draft_logits"), *TREES[::2]])
def test_faults_over_rounds_are_noticed(rule, form, fault):
    n = 16_000 if "own position" in fault else 6_000
    with running(BACKENDS[-1]):
        p = p_value(sequences(n, 4, rule, form, **FAULTS[fault]), 4)
    # Judged draft by draft, nothing behind the refusal has been looked at.
    harmless = rule == "token" and form == "draft_logits" and "own position" in fault
    assert p > RIGHT if harmless else p < WRONG


def test_noise_by_the_tokens_own_position_is_not_noticed_in_one_call():
    with running(BACKENDS[-1]):
        fault = FAULTS["draft noise by the token's own position"]
        assert p_value(sequences(30_000, 1, "block", "draft_logits", **fault), 1) > RIGHT


def coin(key, stream=COIN, group=0):
    """The reference's ``accept`` with coins of other keys."""

    def accept(seed, position, i, q, p, decide):
        where, index = key(position, i)
        return uniform(seed, where, stream, index, group) * q < p

    return accept


COINS = {
    "as they are": (coin(lambda position, i: (position, i)), REPEATING, 100),
    "by the absolute position": (coin(lambda position, i: (position + i, 0)), REPEATING, 600),
    "the numbers of the draft": (coin(lambda position, i: (position, i), DRAFT, PICK), CROSSED, 250),
}


@pytest.mark.parametrize("coins", COINS)
def test_coins_of_block_verification(coins, monkeypatch):
    """Faults inside of the verifier, put into the reference."""
    accept, world, n = COINS[coins]
    monkeypatch.setattr(chain, "accept", accept)
    with running("reference"):
        p = p_value(sequences(n, 3, "block", "draft_logits", world=world), 3, world)
    assert p > RIGHT if coins == "as they are" else p < WRONG
