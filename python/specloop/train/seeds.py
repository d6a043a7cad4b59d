"""Prompts that a target's training text begins with: data/seeds.json, written for this project.

The file holds prompts as they are and families of prompts with slots, from which so many are drawn. All is a function
of the file and a seed, so the number of a prompt says which one it was. In a text, ``{name}`` is a value of that
slot's list, the same wherever it is repeated; ``{name.2}`` is another value of the list; ``{Name}`` begins with a
capital; ``{3-9}`` is a number, another one each time. Values may have slots themselves.

Many prompts are ambiguous on purpose: several continuations are about equally likely, and a draft has to learn the
target's whole distribution there, not its favourite.
"""

from __future__ import annotations

import json
import random
import re
from importlib import resources
from typing import NamedTuple

CATEGORIES = ("chat", "instruct", "code", "classification", "copy_edit", "summary", "ambiguous")
TRIES = 30  # times as many draws as prompts that a family is to have
_SLOT = re.compile(r"\{(?:(\d+)-(\d+)|([A-Za-z][a-z -]*?)(?:\.(\d))?)\}")


class Seed(NamedTuple):
    """``turns``: what the user said, what the answer was, and so on; the last is the user's."""

    category: str
    turns: tuple[str, ...]

    @property
    def messages(self) -> list[dict]:
        """As a chat template takes them."""
        return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(self.turns)]


def seed_prompts(seed: int = 0) -> list[Seed]:
    """All prompts in a mixed order, each once; about 29,000. ``seed`` decides what is drawn, and the order.

    Raises ValueError where the file asks for more than a family can give, or for a slot that there is not.
    """
    data = json.loads(resources.files("specloop.data").joinpath("seeds.json").read_text(encoding="utf-8"))
    found: dict[tuple, str] = {}
    for group in data["written"]:
        for prompt in group["prompts"]:
            found.setdefault((prompt,) if isinstance(prompt, str) else tuple(prompt), group["category"])
    for number, family in enumerate(data["families"]):
        draw = random.Random(f"{seed} {number}").random
        wanted = len(found) + family["count"]
        for _ in range(TRIES * family["count"]):
            if len(found) == wanted:
                break
            text, fill = _one_of(family["texts"], draw), _Filled(data["slots"], draw)
            turns = [text] if isinstance(text, str) else text
            found.setdefault(tuple(map(fill, turns)), family["category"])
        if len(found) < wanted:
            raise ValueError(f"family {number}: expected {family['count']} prompts, it gives fewer")
    draw = random.Random(f"{seed} order").random
    return [Seed(category, turns) for _, turns, category in sorted((draw(), t, c) for t, c in found.items())]


def _one_of(values, draw):
    return values[int(draw() * len(values))]  # random() is the one method whose numbers Python promises to keep


class _Filled:
    """Fills the slots of one prompt, all its turns alike."""

    def __init__(self, slots, draw):
        self._slots, self._draw, self._values = slots, draw, {}

    def __call__(self, text):
        return _SLOT.sub(self._slot, text)

    def _slot(self, match):
        low, high, name, which = match.groups()
        if low is not None:
            return str(int(low) + int(self._draw() * (int(high) - int(low) + 1)))
        key = name.lower()
        if key not in self._slots:
            raise ValueError(f"seeds: no slot is called {key!r}")
        value = self._values.get((key, which))
        if value is None:
            value = self._values[key, which] = self._other(key)
        return value if name == key else value[0].upper() + value[1:]

    def _other(self, key):
        """A value that no other slot of that list has in this prompt."""
        while True:
            value = self(_one_of(self._slots[key], self._draw))
            if all(value != taken for (other, _), taken in self._values.items() if other == key):
                return value
