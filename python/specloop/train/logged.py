"""Contexts of real speculative runs: texts that a target wrote with its draft, and where the draft was asked.

In a run a draft is asked at the ids where rounds begin, and what it guesses at depth i counts only if all before it was
accepted. These are not any ids: behind an accepted chain stands what was easy, behind a refused draft what it got
wrong. A draft that ends its training on the very chains that were judged trains on what it will be asked.

A text is a shard's like any other (corpus.py), one pass of the target over ids that the decode loop made, and with it
``reached``: how many drafts were judged, the accepted ones and the refused one, of the chain that began at a row. The
lookup that stands in front of a draft in every run is in front of it here: chains that were looked up don't count, as
the draft was not asked there.

Text number i is a function of the settings, the draft and i alone, as rows of a pass and the chains of a fixed length
are; unless the machine stands still for so long (a second) that the loop gives up a chain. Prompts that are held out in
training are left out.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from ..checks import integer
from ..drafts.lookup import LookupDraft
from ..errors import ModelError
from ..formats.draft_file import is_draft_file
from ..formats.safetensors import read
from .checkpoint import checksum
from .corpus import Text
from .fill import Report, fill
from .generate import (
    LEAST_ANSWER,
    LOOP_FROM,
    Settings,
    about_target,
    choice,
    likeliest,
    manifest,
    most_prompt,
    repetition,
)
from .prompt_ids import PromptIds
from .samples import is_held_out
from .seeds import seed_prompts

AT_ONCE = 32  # texts that are asked for together; how many run at once is the pair's own choice
PATIENCE = 1e6  # seconds of a pass: a clock has no say in what is drafted


def log_contexts(
    pair,
    folder,
    *,
    shards: int,
    settings: Settings | None = None,
    k: int = 3,
    progress: Callable[[float], None] | None = None,
) -> Report:
    """Writes shards 0 .. ``shards`` - 1 of a corpus of speculative runs, those that are missing in ``folder``.

    ``pair``: a target with a feature head from a draft file. ``k``: drafts per round, as many as the head has depths in
    training. ``settings``: as of the corpus, but that no prompt is made up; prompts come in the opposite order, so that
    small corpora of both kinds share none. ``progress(fraction)`` is called for every id; whatever it raises ends it,
    and complete shards stay. A folder that was begun with another draft is refused.

    Raises what :func:`generate.generate_corpus` raises, ModelError for a pair without such a draft, and what
    ``Pair.generate`` does.
    """
    settings = replace(settings or Settings(), made_up=0.0)
    settings.check()
    integer("shards", shards, 1)
    integer("k", k, 1, 64)
    pair.ready()
    about, runs = about_target(pair), _Runs(pair, settings, k, progress or (lambda fraction: None))
    told = manifest(pair, settings, runs.prompts, about) | {"draft": _sum_of(pair), "k": k}
    return fill(folder, told, about, runs.write, shards=shards, size=settings.texts, progress=runs.tell)


def reached(sources: Sequence, proposed: Sequence[int], accepted: Sequence[int], answer: int) -> list[int]:
    """For each of ``answer`` ids how many drafts were judged of the chain that began there, 0 where none did.

    Of each round, in their order: whose drafts there were (None = nobody's), how many, how many the target accepted.
    """
    rows, at = [0] * answer, 0
    for source, k, taken in zip(sources, proposed, accepted, strict=True):
        if source not in (None, LookupDraft.name) and at < answer:
            rows[at] = min(taken + 1, k, answer - at)
        at += taken + 1  # a token that no draft had
    return rows


def _sum_of(pair):
    """Of the draft's numbers: a file may say more, the time it took say, and be the same draft."""
    if pair.draft_failure is not None:
        raise ModelError(f"pair: expected one with its draft, which can't be used: {pair.draft_failure}")
    if not pair.draft_reads_features or not is_draft_file(pair.draft_name):
        raise ModelError(f"pair: expected one with a feature head from a file, got draft {pair.draft_name}")
    return checksum(read(pair.draft_name)[0])


class _Runs:
    """Makes texts by number."""

    def __init__(self, pair, settings, k, progress):
        self._pair, self._settings, self._k, self._progress = pair, settings, k, progress
        self.prompts, self._ids = seed_prompts(settings.seed), PromptIds(pair)
        self._most_prompt, self._fraction = most_prompt(pair.model, settings), 0.0

    def tell(self, fraction):
        self._fraction = fraction
        self._progress(fraction)

    def write(self, numbers) -> Iterator[tuple[int, Text | str]]:
        """Yields (number, text or why it was dropped)."""
        waiting = iter(numbers)
        while some := list(itertools.islice(waiting, AT_ONCE)):
            asked = {}
            for number in some:
                seed = len(self.prompts) - 1 - number % len(self.prompts)
                ids = self._ids.of(self.prompts[seed])
                why = "prompt too long" if len(ids) > self._most_prompt else None
                if is_held_out(torch.tensor(ids, dtype=torch.int32)):
                    why = "prompt held out"
                if why:
                    yield number, why
                else:
                    asked[number] = ids, seed, *self._drawn(number)
            if asked:
                yield from zip(asked, map(self._outcome, asked.values(), self._run(asked.values())), strict=True)

    def _drawn(self, number):
        """(temperature, key of the random numbers) of a text."""
        draw = random.Random(f"{self._settings.seed} run {number}").random
        return choice(self._settings.temperatures, draw()), int(draw() * 2**53)

    def _run(self, asked):
        prompts = [ids for ids, *_ in asked]
        each = [{"temperature": temperature, "seed": key} for _, _, temperature, key in asked]
        more = {"k": self._k, "max_new_tokens": self._settings.answer_tokens, "verify_timeout": PATIENCE}
        return self._pair.generate_batch(prompts, each=each, callback=lambda event: self.tell(self._fraction), **more)

    def _outcome(self, asked, result) -> Text | str:
        prompt, seed, temperature, _ = asked
        answer, rounds = result.tokens, result.stats.speculation
        if len(answer) < LEAST_ANSWER:
            return "answer too short"
        if len(answer) >= LOOP_FROM and repetition(answer) > self._settings.repeats:
            return "loop"
        judged = reached(rounds.source_history, rounds.k_history, rounds.accepted_history, len(answer))
        if not any(judged):
            return "nothing drafted"
        ids = [*prompt, *answer]
        rows = self._pass(ids, len(prompt))
        judged = torch.tensor(judged, dtype=torch.uint8)
        return Text(torch.tensor(ids, dtype=torch.int32), len(prompt), *rows, temperature, seed, judged)

    def _pass(self, ids, prompt):
        """What the target thought: features of all ids; lse, top_ids and top_logprobs of the answer's."""
        import specdec_kernels as sk

        with self._pair.place.lock:
            model = self._pair.model
            cache = model.new_cache(len(ids), features=True)
            logits = model.forward(ids, cache, last=len(ids) - prompt + 1)[:-1]
            best, log_p = sk.sample(logits, temperature=0.0, return_logprobs=True)
            return cache.features[: len(ids)].cpu().clone(), *likeliest(logits, best, log_p)
