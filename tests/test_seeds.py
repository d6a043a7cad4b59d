"""Prompts for training: enough, distinct, the same each time, and held apart from what drafts are measured on."""

import json
import re
from collections import Counter
from importlib import resources

import pytest

from specloop.train import seeds
from specloop.train.seeds import CATEGORIES, Seed, seed_prompts

HELD_OUT = ("prompts.json", "copy_edit.json", "agreement_prompts.json", "evaluation_prompts.json")
LABELS = ("category", "kind", "name", "id")  # keys whose values are no part of a prompt
RUN = 8  # words


@pytest.fixture(scope="module")
def prompts():
    return seed_prompts()


def words(text):
    return re.findall(r"[a-z0-9']+", text.lower())


def runs(text):
    found = words(text)
    return {tuple(found[i : i + RUN]) for i in range(len(found) - RUN + 1)}


def texts_of(value):
    """All strings of a JSON value but for labels."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, part in value.items():
            if key not in LABELS:
                yield from texts_of(part)
    elif isinstance(value, list):
        for part in value:
            yield from texts_of(part)


def test_there_are_many_and_none_twice(prompts):
    assert len(prompts) >= 20_000
    assert len({prompt.turns for prompt in prompts}) == len(prompts)
    counts = Counter(prompt.category for prompt in prompts)
    assert set(counts) == set(CATEGORIES) and min(counts.values()) >= 1000, counts
    assert sum(len(prompt.turns) == 3 for prompt in prompts) >= 500
    for prompt in prompts:
        assert len(prompt.turns) % 2 == 1 and all(turn == turn.strip() != "" for turn in prompt.turns), prompt
        assert max(len(turn.split()) for turn in prompt.turns) < 200, prompt
        assert not any(seeds._SLOT.search(turn) for turn in prompt.turns), prompt


def test_any_beginning_is_a_mixture(prompts):
    first = Counter(prompt.category for prompt in prompts[:1000])
    for category, count in Counter(prompt.category for prompt in prompts).items():
        assert first[category] == pytest.approx(count * 1000 / len(prompts), rel=0.4)


def test_a_seed_says_it_all(prompts):
    assert seed_prompts(0) == prompts
    others = seed_prompts(1)
    assert others[:50] != prompts[:50] and len(others) >= 20_000


def test_slots():
    draw = iter([0.0, 0.0, 0.99, 0.5, 0.0, 0.99]).__next__
    fill = seeds._Filled({"a": ["one", "two"], "b": ["<{a}>"]}, draw)
    assert fill("{a} {b} {a} {A}") == "one <one> one One"  # two draws
    assert fill("{a.2}") == "two"
    assert (fill("{3-5}"), fill("{3-5}"), fill("{3-5}")) == ("4", "3", "5")
    with pytest.raises(ValueError, match="no slot is called 'c'"):
        fill("{c}")
    assert fill("f() { return; }") == "f() { return; }"


def test_messages():
    assert Seed("chat", ("a", "b", "c")).messages == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]


def test_nothing_that_is_measured_is_trained_on(prompts):
    """No prompt held out is a seed, whatever its case and punctuation, nor shares eight words in a row with one."""
    folder, held_out = resources.files("specloop.data"), []
    for name in HELD_OUT:
        if folder.joinpath(name).is_file():
            held_out += texts_of(json.loads(folder.joinpath(name).read_text(encoding="utf-8")))
    assert len(held_out) > 500
    whole, parts = {tuple(words(text)) for text in held_out}, set().union(*map(runs, held_out))
    found = []
    for prompt in prompts:
        texts = [*prompt.turns, "\n".join(prompt.turns)]
        found += [text for text in texts if tuple(words(text)) in whole or not parts.isdisjoint(runs(text))]
    assert not found, f"{len(found)} seeds are held out, the first: {found[:5]}"
