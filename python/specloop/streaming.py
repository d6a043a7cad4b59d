"""One running request: ids become text, text becomes events."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .options import Options
from .stats import Stats, peak_memory
from .stops import StopMatcher

if TYPE_CHECKING:
    from .pair import Pair


@dataclass(frozen=True, slots=True)
class Event:
    """One emitted token. ``text`` is valid UTF-8, "" while a character or a possible stop string is incomplete.

    ``finish_reason`` is set in the last event. Only after a cancel may there be an event without a token (``token``
    None): the text that was held back.
    """

    token: int | None
    text: str
    from_draft: bool = False
    finish_reason: str | None = None


@dataclass(slots=True)
class Result:
    text: str
    tokens: list[int]  # emitted ids, with the one that ended the text (EOS, or the last of a stop string)
    finish_reason: str | None
    stats: Stats

    def as_dict(self) -> dict:
        head = {"text": self.text, "tokens": list(self.tokens), "finish_reason": self.finish_reason}
        return head | self.stats.as_dict()


class Reader:
    """Ids in, text out: whole characters only, nothing of a stop string, nothing after it."""

    def __init__(self, tokenizer, stops: Sequence[str]):
        from .text.tokenizer import StreamDecoder

        self._decoder = StreamDecoder(tokenizer, special=False)
        self._stops = StopMatcher(stops)
        self._text = ""

    def push(self, token: int) -> bool:
        """Whether the text ends with this token."""
        self._text += self._stops.push(self._decoder.push(token))
        return self._stops.hit is not None

    def take(self, *, end: bool) -> str:
        """What became readable since the last call; at the end also what was held back."""
        if end:
            self._text += self._stops.push(self._decoder.flush()) + self._stops.flush()
        text, self._text = self._text, ""
        return text


class Stream:
    """A running request: iterate for its events, ``cancel()`` from any thread, ``result`` at any time.

    ``follows``: its draft is the pair's, and is exchanged when that is. ``whole``: it ends, without a finish reason,
    when the target is exchanged.
    """

    def __init__(self, pair: Pair, ids: list[int], options: Options, cancel=None, *, follows=False, whole=False):
        import torch

        from .decode import Request, Sampling

        if pair.settings.get("threads"):
            torch.set_num_threads(pair.settings["threads"])
        self._cancel = threading.Event()
        self._reader = Reader(pair.tokenizer, options.stop)
        self._prompt_tokens, self._texts = len(ids), []
        sampling = Sampling(options.temperature, options.top_k, options.top_p, options.min_p, options.seed)
        limit = min(len(ids) + options.max_new_tokens, pair.context)
        self._request = Request(ids, limit, sampling, self._reader.push, _either(self._cancel, cancel))
        stats, model = self._request.stats, pair.model
        stats.prompt_tokens, stats.timing.load_seconds = len(ids), pair.load_seconds
        stats.settings = pair.settings | options.as_dict() | {"generation": pair.generation}
        stats.backend = backend_name(model)
        stats.memory.budget = pair.budget
        self._seat = pair.seat(max(limit - 1, 1))
        self._tokens = _decode(pair, self._seat, self._request, options, follows, whole)

    def cancel(self) -> None:
        """Ends the request within the round that is running; what was emitted stays."""
        self._cancel.set()

    def close(self) -> None:
        """Ends the request now. Call it from the thread that iterates."""
        self._tokens.close()
        if self._request.finish_reason is None:
            self._request.finish_reason = "cancelled"
        self._seat.leave()
        self._keep(self._reader.take(end=True))

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        try:
            token, from_draft = next(self._tokens, (None, False))
        except BaseException:
            self._seat.leave()
            raise
        reason = self._request.finish_reason
        if token is None or reason is not None:
            self._seat.leave()
        text = self._keep(self._reader.take(end=reason is not None))
        if token is None and not text:
            raise StopIteration
        return Event(token, text, from_draft, reason)

    def _keep(self, text: str) -> str:
        self._texts.append(text)
        return text

    @property
    def result(self) -> Result:
        """What there is so far; complete once the iteration has ended."""
        request = self._request
        tokens, memory = request.ids[self._prompt_tokens :], request.stats.memory
        request.stats.completion_tokens = len(tokens)
        memory.peak, memory.resident = peak_memory(), self._seat.resident_bytes
        memory.streamed_bytes, memory.released = self._seat.streamed_bytes, list(self._seat.released)
        return Result("".join(self._texts), tokens, request.finish_reason, request.stats)


def _either(event, cancel):
    """One function for both ways in which a request is cancelled; ``cancel``: an event, a function, or None."""
    also = cancel.is_set if hasattr(cancel, "is_set") else cancel
    return lambda: event.is_set() or bool(also and also())


def _decode(pair, seat, request, options, follows, whole):
    """decode() from the committed ids on, begun anew whenever a target or a draft was exchanged."""
    from .decode import decode

    version = seat.generation
    while not (whole and version != seat.generation):
        generation = pair.generation
        request.moved = lambda generation=generation: pair.generation != generation
        draft = _draft(pair, options, request.limit, follows)
        yield from decode(seat, seat, request, draft, _controller(pair, options, draft), seat.lock)
        if request.finish_reason is not None:
            return
        request.stats.swaps += 1


def _draft(pair, options, limit, follows):
    from .drafts.lookup import LookupDraft
    from .drafts.model import ModelDraft
    from .faults import GuardedDraft

    name, model, draft = pair.draft if follows else options.draft, pair.model, None
    most = max(options.k if isinstance(options.k, int) else 8, 8)
    if options.k == 0 or name == "none":
        pass
    elif name == "lookup":
        draft = LookupDraft(max_tokens=most)
    else:
        draft = ModelDraft(pair.draft_seat(limit), model.vocab_size, most)
    guarded = GuardedDraft(draft, model.vocab_size, model.eos_ids)
    pair.pressure.watch(guarded)
    return guarded


def _controller(pair, options, draft):
    from .controller import Auto, Fixed

    if draft.draft is None or options.max_new_tokens < 2:
        return Fixed(0)
    cost = pair.draft_cost if draft.draft.name == "model" else 0.0
    return Auto(pair.costs, cost) if options.k == "auto" else Fixed(options.k)


def backend_name(model) -> str | None:
    """Which backend does the model's work, with its instruction set: "cpu/avx2", "cuda", "reference"."""
    from specdec_kernels import native, registry

    try:
        name = registry.candidates("linear_int8", getattr(model, "device_type", "cpu"))[0][0]
    except registry.BackendUnavailable:
        return None
    return f"{name}/{native.cpu.isa()}" if name == "cpu" else name
