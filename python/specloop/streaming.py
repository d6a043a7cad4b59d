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
    """A running request: iterate for its events, ``cancel()`` from any thread, ``result`` at any time."""

    def __init__(self, pair: Pair, ids: list[int], options: Options, cancel=None):
        import torch

        from .decode import Request, Sampling, decode

        if pair.settings.get("threads"):
            torch.set_num_threads(pair.settings["threads"])
        model, self._pair = pair.model, pair
        context = min(model.context, pair.settings.get("context", model.context))
        self._cancel = threading.Event()
        self._also = cancel.is_set if hasattr(cancel, "is_set") else cancel
        self._reader = Reader(pair.tokenizer, options.stop)
        self._prompt_tokens, self._texts = len(ids), []
        sampling = Sampling(options.temperature, options.top_k, options.top_p, options.min_p, options.seed)
        limit = min(len(ids) + options.max_new_tokens, context)
        self._request = Request(ids, limit, sampling, self._reader.push, self._cancelled)
        stats = self._request.stats
        stats.prompt_tokens, stats.timing.load_seconds = len(ids), pair.load_seconds
        stats.settings = pair.settings | options.as_dict()
        stats.backend = backend_name(model)
        stats.memory.resident = getattr(model, "nbytes", None)
        draft, controller = _draft(pair, options), _controller(pair, options)
        cache = model.new_cache(max(limit - 1, 1))
        self._tokens = decode(model, cache, self._request, draft, controller, pair._model_lock)

    def _cancelled(self) -> bool:
        return self._cancel.is_set() or bool(self._also and self._also())

    def cancel(self) -> None:
        """Ends the request within the round that is running; what was emitted stays."""
        self._cancel.set()

    def close(self) -> None:
        """Ends the request now. Call it from the thread that iterates."""
        self._tokens.close()
        if self._request.finish_reason is None:
            self._request.finish_reason = "cancelled"
        self._keep(self._reader.take(end=True))

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        token, from_draft = next(self._tokens, (None, False))
        reason = self._request.finish_reason
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
        tokens = request.ids[self._prompt_tokens :]
        request.stats.completion_tokens = len(tokens)
        request.stats.memory.peak = peak_memory()
        return Result("".join(self._texts), tokens, request.finish_reason, request.stats)


def _draft(pair, options):
    from .drafts.lookup import LookupDraft
    from .faults import GuardedDraft

    most = options.k if isinstance(options.k, int) else 8
    draft = LookupDraft(max_tokens=max(most, 8)) if options.draft == "lookup" and options.k != 0 else None
    return GuardedDraft(draft, pair.model.vocab_size, pair.model.eos_ids)


def _controller(pair, options):
    from .controller import Auto, Fixed

    if options.draft == "none" or options.max_new_tokens < 2:
        return Fixed(0)
    return Auto(pair.costs) if options.k == "auto" else Fixed(options.k)


def backend_name(model) -> str | None:
    """Which backend does the model's work, with its instruction set: "cpu/avx2", "cuda", "reference"."""
    from specdec_kernels import native, registry

    try:
        name = registry.candidates("linear_int8", getattr(model, "device_type", "cpu"))[0][0]
    except registry.BackendUnavailable:
        return None
    return f"{name}/{native.cpu.isa()}" if name == "cpu" else name
