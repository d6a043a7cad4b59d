"""What ``bench`` and ``evaluate`` share: shipped prompts, sides that take turns, and what may be said of their times.

Speeds of one machine change within minutes, so sides run one after the other on each prompt, in an order that rotates.
A figure is the median of the pairs' ratios; plain decoding against itself, taken the same way, is the noise: an effect
inside its interval is no effect.
"""

from __future__ import annotations

import json
import random
import statistics
from importlib import resources

from .checks import integer
from .errors import OptionError, show


def load_prompts(categories=(), most=None, *, file="prompts") -> list[dict]:
    """The shipped prompts of a file, a category after the other; of those given, ``most`` of each."""
    text = resources.files(__package__).joinpath(f"data/{file}.json").read_text(encoding="utf-8")
    prompts = json.loads(text)
    known = list(dict.fromkeys(p["category"] for p in prompts))
    for category in categories:
        if category not in known:
            raise OptionError(f"category: expected one of {', '.join(known)}, got {show(category)}")
    if most is not None:
        integer("prompts", most, 1)
    chosen = []
    for category in known:
        if not categories or category in categories:
            chosen += [p for p in prompts if p["category"] == category][:most]
    return chosen


def take_turns(sides: dict, prompt, turn: int) -> dict:
    """What each side makes of the prompt; the order of the n-th turn begins with the n-th side."""
    names = list(sides)
    first = turn % len(names)
    return {name: sides[name](prompt) for name in names[first:] + names[:first]}


def median(values):
    """Of those that are known; None if there are none."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def interval(values, draws=1000):
    """Bootstrap 95 % interval of the median of those that are known, or None if there is nothing to draw from."""
    values = [value for value in values if value is not None]
    if not values:
        return None
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(draws))
    return [medians[int(0.025 * draws)], medians[int(0.975 * draws)]]
