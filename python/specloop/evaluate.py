"""How good a draft is: acceptance by position, tokens per pass, milliseconds and speed-up, by category and temperature.

Each prompt is answered plainly, with drafts in each way of choosing K, and plainly again, the sides taking turns
(measure.py). A prompt of two turns is a conversation: the second is answered after the side's own answer to the first.
At T = 0 the ids of all sides have to be the same, and the report says whether they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from .cells import Answers, Trio, cell
from .checks import integer
from .errors import OptionError, OutOfMemory
from .measure import load_prompts, take_turns
from .options import check_draft_model, check_k, check_request
from .session import backend_name

FORM = 1  # of the report
PAIRS, QUICK_PAIRS = 15, 3
WARM_UP = 32  # tokens


@dataclass(frozen=True)
class Plan:
    """What is measured; see :func:`check_plan`."""

    drafts: tuple[str, ...]
    ks: tuple[int | str, ...]
    temperatures: tuple[float, ...]
    repetition_penalties: tuple[float, ...]
    pairs: int
    max_new_tokens: int
    seed: int | None


def check_plan(
    *,
    drafts=("auto",),
    ks=("auto", 3),
    temperatures=(0.0, 0.7, 1.0),
    repetition_penalties=(1.0, 1.1),
    pairs=PAIRS,
    max_new_tokens=128,
    seed=None,
) -> Plan:
    """The plan, checked. ``drafts``: as of ``load``. ``pairs``: of each cell of the table; its prompts take turns.

    ``seed``: None draws one per text; with one, pair i of a cell has seed + i, the texts can be made again, and K is
    chosen by nominal costs where it has a say in them (controller.py). Each of the first four has at least one member.
    """
    axes = {"drafts": drafts, "ks": ks, "temperatures": temperatures, "repetition_penalties": repetition_penalties}
    for name, values in axes.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise OptionError(f"{name}: expected a list of at least one, got {values!r}")
    integer("pairs", pairs, 1)
    once = lambda values: tuple(dict.fromkeys(values))
    of = lambda **options: check_request(max_new_tokens=max_new_tokens, **options)
    if seed is not None:
        of(seed=seed)
        of(seed=seed + pairs - 1)
    return Plan(
        drafts=once(map(check_draft_model, drafts)),
        ks=once(map(check_k, ks)),
        temperatures=once(of(temperature=temperature).temperature for temperature in temperatures),
        repetition_penalties=once(of(repetition_penalty=p).repetition_penalty for p in repetition_penalties),
        pairs=pairs,
        max_new_tokens=max_new_tokens,
        seed=seed,
    )


def evaluation_prompts(categories=(), *, quick=False) -> list[dict]:
    """{"category", "turns"}: the shipped prompts, which no training text has; ``quick``: three of each category."""
    prompts = load_prompts(categories, file="evaluation_prompts")
    return [prompt for prompt in prompts if prompt.get("quick") or not quick]


def run(pair, prompts, plan: Plan, *, progress=None) -> dict:
    """Measures; the report is what ``--json`` prints. The pair's draft is exchanged for each of the plan's."""
    for draft in plan.drafts if len(plan.drafts) > 1 else ():
        _use(pair, draft)  # one that can't be loaded is told of before the others take minutes
    settings = [
        {"temperature": temperature, "repetition_penalty": penalty}
        for temperature in plan.temperatures
        for penalty in plan.repetition_penalties
    ]
    groups = {}
    for prompt in prompts:
        groups.setdefault(prompt["category"], []).append(prompt["turns"])
    steps, done = len(plan.drafts) * len(settings) * len(groups) * plan.pairs, itertools.count(1)
    step = lambda: progress and progress("measuring", next(done) / steps)
    drafts, cells = [], []
    for draft in plan.drafts:
        drafts.append(_use(pair, draft))
        for options in settings:
            cells += [{"draft": draft} | found for found in _measure(pair, groups, plan, options, step)]
        if pair.draft != drafts[-1]["loaded"]:
            raise OutOfMemory(f"draft: {draft} was given up for want of memory while it was measured")
    if progress:
        progress(None, 1.0)
    return {
        "form": FORM,
        "settings": asdict(plan) | pair.settings,
        "prompts": {category: len(group) for category, group in groups.items()},
        "backend": backend_name(pair.model),
        "row_costs_ms": [seconds * 1e3 for seconds in pair.costs],
        "drafts": drafts,
        "cells": cells,
    }


def _use(pair, draft) -> dict:
    """Makes it the pair's draft: what came of it. The one before it goes first: there may be no room for two."""
    pair.swap(draft="none")
    pair.swap(draft=draft)
    size, whole = pair.draft_nbytes, getattr(pair.model, "weights_nbytes", None)
    return {
        "draft": draft,
        "loaded": pair.draft,
        "path": pair.draft_name,
        "bytes": size,
        "share_of_target": size / whole if size and whole else None,
        "ms_per_row": pair.draft_cost * 1e3 or None,
    }


def _measure(pair, groups, plan, options, step) -> list[dict]:
    """The cells of the pair's draft with these options."""
    ks = (0,) if pair.draft == "none" else plan.ks
    say = lambda turns, **own: Answers(converse(pair, turns, **options, **own))
    sides = {
        "plain": lambda prompt: say(**prompt, draft="none"),
        **{k: lambda prompt, k=k: say(**prompt, k=k) for k in ks},
        "again": lambda prompt: say(**prompt, draft="none"),
    }
    first = next(iter(groups.values()))[0]
    for side in sides.values():  # the first call of each pays for what is made once
        side({"turns": first, "max_new_tokens": min(WARM_UP, plan.max_new_tokens)})
    trios = {k: {category: [] for category in groups} for k in ks}
    for category, group in groups.items():
        for i in range(plan.pairs):
            seed = None if plan.seed is None else plan.seed + i
            prompt = {"turns": group[i % len(group)], "max_new_tokens": plan.max_new_tokens, "seed": seed}
            said = take_turns(sides, prompt, i)
            for k in ks:
                trios[k][category].append(Trio(said["plain"], said[k], said["again"]))
            step()
    found = []
    for k, parts in trios.items():
        if len(parts) > 1:
            parts["all"] = [trio for group in parts.values() for trio in group]
        for category, part in parts.items():
            figures = cell(part, greedy=options["temperature"] == 0)
            found.append({"k": k, **options, "category": category, **figures})
    return found


def converse(pair, turns, **options) -> list:
    """The results of all turns, each of which is told what was said before it."""
    results, messages = [], []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        chat = pair.chat_template is not None
        prompt = messages if chat else "\n\n".join(message["content"] for message in messages)
        results.append(pair.generate(prompt, **options))
        messages.append({"role": "assistant", "content": results[-1].text})
    return results
