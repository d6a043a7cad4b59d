"""Self-generation: a target answers prompts, and what it thinks meanwhile is kept for a draft to learn from.

Text number i of a corpus is a function of the corpus' settings and of i alone: which prompt, at which temperature, with
which random numbers. Rows of a pass don't depend on each other (models/base.py), so neither do texts on who runs beside
them, and a shard that is made again is the same byte for byte. Generation that was ended goes on with the shards that
are missing.

Some prompts the target makes up itself: it is given what a chat template writes in front of a user's turn, and draws
that turn like any other text (Xu et al. 2024, Magpie, arXiv 2406.08464).
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch

from ..checks import integer, real
from ..errors import ModelError, ModelFault, OptionError
from ..models.base import Part, forward_parts
from .corpus import TOP, Text
from .fill import Report, fill
from .prompt_ids import PromptIds
from .seeds import seed_prompts

AT_ONCE = 64  # texts per pass
PROMPT_ROWS = 256  # of new texts in one pass, so that those that are under way don't wait too long
LEAST_ANSWER = 2  # ids
LOOP_EVERY, LOOP_FROM = 32, 24  # ids: how often an answer is searched for loops, and from which length on
GRAM = 4
STREAM = 3  # of random numbers: plain decoding


@dataclass(frozen=True)
class Settings:
    """What a corpus is a function of, besides the target.

    ``texts``: begun per shard; those that are dropped are missing. ``answer_tokens``, ``prompt_tokens``: most ids.
    ``made_up``: share of prompts that the target makes up, 0 .. 1, of ``made_up_tokens`` at most. ``temperatures``:
    (temperature, share) of the answers. ``repeats``: share of an answer's 4-grams that may be repetitions.
    """

    seed: int = 0
    texts: int = 256
    answer_tokens: int = 192
    prompt_tokens: int = 320
    made_up: float = 0.3
    made_up_tokens: int = 120
    temperatures: tuple[tuple[float, float], ...] = ((0.0, 0.4), (0.7, 0.25), (1.0, 0.35))
    repeats: float = 0.3

    def check(self) -> None:
        """Raises OptionError that names the first value that can't be used."""
        counts = {"seed": 0, "texts": 1, "answer_tokens": LEAST_ANSWER, "prompt_tokens": 1, "made_up_tokens": 1}
        for name, least in counts.items():
            integer(name, getattr(self, name), least)
        for name in ("made_up", "repeats"):
            real(name, getattr(self, name), 0, 1)
        shares = self.temperatures
        if not shares or not all(t >= 0 and share >= 0 for t, share in shares) or not sum(s for _, s in shares) > 0:
            raise OptionError(f"temperatures: expected pairs (temperature >= 0, share >= 0), got {shares!r}")


def generate_corpus(
    target,
    folder,
    *,
    shards: int,
    settings: Settings | None = None,
    at_once: int = AT_ONCE,
    progress: Callable[[float], None] | None = None,
) -> Report:
    """Writes shards 0 .. ``shards`` - 1 of a corpus, those that are missing in ``folder``, and says what it took.

    ``target``: what has ``model``, ``tokenizer`` and ``chat_template`` (or None): a Version, a Pair. ``at_once``: texts
    per pass, fewer where memory asks for it; it changes no text. ``progress(fraction)`` is called with 0 .. 1; whatever
    it raises ends the generation, and complete shards stay.

    Raises OptionError (a setting; a folder with another corpus, or one that another writes to), ModelError (a target
    without hidden states; no prompt fits; nothing that it writes can be kept), ModelFault (logits without a number),
    DiskError, OutOfMemory.
    """
    settings = settings or Settings()
    settings.check()
    integer("shards", shards, 1)
    integer("at_once", at_once, 1)
    about = about_target(target)
    writer = _Writer(target, settings)
    told = manifest(target, settings, writer.prompts, about)
    write = lambda numbers: writer.write(numbers, at_once)
    return fill(folder, told, about, write, shards=shards, size=settings.texts, progress=progress)


def about_target(target):
    """Whose corpus it is. Raises ModelError for a target that none can be made of."""
    from ..fingerprint import fingerprint

    model, name = target.model, getattr(target.model, "name", "the model")
    if getattr(model, "feature_size", None) is None:
        raise ModelError(f"target: expected a model that gives its hidden states, got {name}, which does not")
    if getattr(model, "draft_ids", None) is not None or model.vocab_size < TOP:
        raise ModelError(f"target: expected a whole vocabulary of at least {TOP} ids, got {name}, which has less")
    said = fingerprint(model, target.tokenizer)
    if said is None:
        raise ModelError(f"target: expected a model and a tokenizer with fingerprints, got {name}, which has none")
    return {"target": said, "vocabulary": target.tokenizer.fingerprint}


def manifest(target, settings, prompts, about) -> dict:
    """All that a corpus' shards are a function of."""
    settings = asdict(settings)
    return {
        **about,
        "dtype": getattr(getattr(target.model, "weights", None), "dtype", None),
        "kv": getattr(target.model, "kv", None),
        "feature_size": target.model.feature_size,
        "seed": settings.pop("seed"),
        "settings": settings,
        "prompts": hashlib.sha256(repr(prompts).encode()).hexdigest(),
    }


def most_prompt(model, settings) -> int:
    """Most ids of a prompt. Raises OptionError where the answer leaves no room for one."""
    most = min(settings.prompt_tokens, model.context - settings.answer_tokens)
    if most < 1:
        wanted = f"less than the target's context of {model.context}"
        raise OptionError(f"answer_tokens: expected {wanted}, got {settings.answer_tokens}")
    return most


def likeliest(logits, tokens, log_p):
    """(lse, top_ids, top_logprobs) of rows of logits, of which ``log_p`` is that of one of their ids, ``tokens``."""
    # Not of all columns at once: how torch adds those up may depend on the number of rows.
    lse = logits.gather(1, tokens[:, None])[:, 0] - log_p
    values, ids = logits.topk(TOP)
    return lse.cpu(), ids.int().cpu(), (values - lse[:, None]).half().cpu()


def repetition(ids, gram=GRAM) -> float:
    """The share of the ids' 4-grams that were there before, 0 for fewer than 4 ids."""
    grams = [tuple(ids[i : i + gram]) for i in range(len(ids) - gram + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


class _Writer:
    """Makes texts by number."""

    def __init__(self, target, settings):
        self.model, self.settings = target.model, settings
        self.prompts, self.ids = seed_prompts(settings.seed), PromptIds(target)
        if settings.made_up:
            self.ids.check_made_up()
        self.most_prompt = most_prompt(self.model, settings)

    def write(self, numbers, at_once) -> Iterator[tuple[int, Text | str]]:
        """Yields (number, text or why it was dropped), in the order in which they end."""
        waiting, running = iter(numbers), []
        capacity = self.most_prompt + self.settings.answer_tokens
        at_once = min(at_once, max(1, self.model.room(capacity, also=2 * self.model.feature_size * capacity)))
        while True:
            rows = 0
            while len(running) < at_once and rows < PROMPT_ROWS:
                number = next(waiting, None)
                if number is None:
                    break
                try:
                    draft = _Draft(number, self)
                except MemoryError:
                    if not running:
                        raise
                    waiting, at_once = itertools.chain([number], waiting), len(running)
                    break
                if draft.dropped:
                    yield number, draft.dropped
                    continue
                running.append(draft)
                rows += len(draft.pending)
            if not running:
                return
            self._pass(running)
            for draft in running:
                if draft.dropped or draft.is_complete:
                    yield draft.number, draft.dropped or draft.text()
            running = [draft for draft in running if not (draft.dropped or draft.is_complete)]

    def _pass(self, running):
        """Feeds what is pending of all texts, and draws an id for those that go on."""
        running.sort(key=lambda draft: not draft.ended)  # so that the rows with logits are the last ones
        parts = [Part(draft.cache, draft.pending, int(not draft.ended)) for draft in running]
        logits = forward_parts(self.model, parts)
        for draft in running:
            draft.pending = []
        drawing = [draft for draft in running if not draft.ended]
        if not drawing:
            return
        tokens, lse, top_ids, top_log_p = self._draw(logits, drawing)
        for i, draft in enumerate(drawing):
            draft.take(tokens[i], lse[i], top_ids[i], top_log_p[i])

    def _draw(self, logits, drafts):
        import specdec_kernels as sk

        on = {"device": logits.device}
        tokens, log_p = sk.sample(
            logits,
            temperature=torch.tensor([draft.drawn_at for draft in drafts], **on),
            seed=torch.tensor([draft.key for draft in drafts], **on),
            position=torch.tensor([len(draft.ids) for draft in drafts], **on),
            stream=STREAM,
            return_logprobs=True,
        )
        drawn = tokens.tolist()
        if min(drawn) < 0:
            draft = drafts[drawn.index(min(drawn))]
            raise ModelFault(f"text {draft.number}: no id has a probability: the model's logits are NaN or -inf")
        return drawn, *likeliest(logits, tokens, log_p)


class _Draft:
    """A text in the making. First its prompt may have to be drawn, then its answer is, then its last id is fed."""

    def __init__(self, number, writer):
        draw = random.Random(f"{writer.settings.seed} text {number}").random
        self._writer, self.number, self.dropped, self.ended = writer, number, None, False
        self.key = int(draw() * 2**53)
        self._making_up = draw() < writer.settings.made_up
        self._temperature = choice(writer.settings.temperatures, draw())
        self._rows = []
        if self._making_up:
            self.seed, self.ids, self.prompt = -1, list(writer.ids.opening), 0
        else:
            self.seed = number % len(writer.prompts)
            self.ids = writer.ids.of(writer.prompts[self.seed])
            self.prompt = len(self.ids)
        if len(self.ids) > writer.most_prompt:
            self.dropped = "prompt too long"
            return
        self.pending = list(self.ids)
        self.cache = writer.model.new_cache(writer.most_prompt + writer.settings.answer_tokens, features=True)

    @property
    def drawn_at(self):
        """The temperature of the next id."""
        return 1.0 if self._making_up else self._temperature

    @property
    def is_complete(self):
        return self.ended and not self.pending

    def take(self, token, *row):
        if self._making_up:
            self._take_of_prompt(token)
            return
        settings = self._writer.settings
        self.ids.append(token)
        self.pending = [token]
        self._rows.append(row)
        count = len(self._rows)
        self.ended = token in self._writer.model.eos_ids or count == settings.answer_tokens
        searched = count >= LOOP_FROM and (self.ended or count % LOOP_EVERY == 0)
        if searched and repetition(self.ids[self.prompt :]) > settings.repeats:
            self.dropped = "loop"
        if self.ended and count < LEAST_ANSWER:
            self.dropped = "answer too short"

    def _take_of_prompt(self, token):
        settings, ids = self._writer.settings, self._writer.ids
        count = len(self.ids) - len(ids.opening)
        if token == ids.closing[0]:
            self.ids += ids.closing
            self.prompt, self.pending, self._making_up = len(self.ids), list(ids.closing), False
            if not count:
                self.dropped = "prompt too short"
            elif self.prompt > self._writer.most_prompt:
                self.dropped = "prompt too long"
        elif token in self._writer.model.eos_ids or count == settings.made_up_tokens:
            self.dropped = "prompt without an end"
        else:
            self.ids.append(token)
            self.pending = [token]
            if len(self.ids) > self._writer.most_prompt:
                self.dropped = "prompt too long"

    def text(self) -> Text:
        lse, top_ids, top_log_p = (torch.stack(rows) for rows in zip(*self._rows, strict=True))
        features = self.cache.features[: len(self.ids)].cpu().clone()
        ids = torch.tensor(self.ids, dtype=torch.int32)
        return Text(ids, self.prompt, features, lse, top_ids, top_log_p, self._temperature, self.seed)


def choice(shares, at):
    """The value at ``at`` (0 .. 1) of values with shares."""
    at *= sum(share for _, share in shares)
    for value, share in shares:
        if at < share:
            return value
        at -= share
    return shares[-1][0]
