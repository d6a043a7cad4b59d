"""One request with all that belongs to it: its seat at the model, its draft, and the text that its ids make."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import OptionError, show
from .options import Options
from .stats import Stats, peak_memory
from .stops import StopMatcher

if TYPE_CHECKING:
    from .pair import Pair


@dataclass(frozen=True, slots=True)
class Event:
    """One emitted token. ``text`` is valid UTF-8, "" while a character or a possible stop string is incomplete.

    ``finish_reason`` is set in the last event. Only after a cancel may there be an event without a token (``token``
    None): the text that was held back. ``index``: the request's, in a batch.
    """

    token: int | None
    text: str
    from_draft: bool = False
    finish_reason: str | None = None
    index: int = 0


@dataclass(slots=True)
class Result:
    text: str
    tokens: list[int]  # emitted ids, with the one that ended the text (EOS, or the last of a stop string)
    finish_reason: str | None
    stats: Stats
    logprobs: list | None = None  # (log-probability, [(id, log-probability) of the likeliest] or None) per token

    def as_dict(self) -> dict:
        head = {"text": self.text, "tokens": list(self.tokens), "finish_reason": self.finish_reason}
        if self.logprobs is not None:
            head["logprobs"] = [
                {"logprob": own, "top": top and [list(pair) for pair in top]} for own, top in self.logprobs
            ]
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


class Session:
    """``ids``: the prompt. ``cancel``: an event or a function. ``follows``: the draft is the pair's, and is exchanged
    when that is. ``batch``: the statistics of those that run together.
    """

    def __init__(
        self, pair: Pair, ids: list[int], options: Options, cancel=None, *, follows=False, index=0, batch=None
    ):
        from .request import Request

        self._pair, self._options, self._follows, self.index = pair, options, follows, index
        self._generation, self._begun = pair.generation, False  # what draft, controller and processor are for
        self._cancel, self._prompt_tokens, self._texts = threading.Event(), len(ids), []
        self._reader, model = Reader(pair.tokenizer, options.stop), pair.model
        limit = min(len(ids) + options.max_new_tokens, pair.context)
        self.seat = pair.seat(max(limit - 1, 1))
        draft = make_draft(pair, options, limit, follows, self.seat)
        self.request = Request(
            ids,
            limit,
            self.seat,
            draft,
            make_controller(pair, options, draft),
            sampling_of(options),
            self._reader.push,
            _either(self._cancel, cancel),
            rule={"lossless": "token"}.get(options.rule, options.rule),
            threshold=_threshold(options),
            processor=self._make_processor(),
            logprobs=None if options.logprobs is None else [],
            top_logprobs=options.logprobs or 0,
            draft_until=options.draft_until,
            on_fallbacks=options.on_fallbacks,
            max_fallbacks=options.max_fallbacks,
        )
        stats = self.request.stats
        stats.prompt_tokens, stats.timing.load_seconds = len(ids), pair.load_seconds
        stats.settings = pair.settings | options.as_dict() | {"generation": self._generation}
        stats.backend = backend_name(model)
        stats.memory.budget, stats.batch = pair.budget, batch
        stats.timing.row_seconds = row_seconds(pair, self.request.controller)

    @property
    def is_watched(self) -> bool:
        """Whether a callback is told of its tokens."""
        return self._options.callback is not None

    def keep_up(self) -> None:
        """It begins or goes on: after an exchange with another draft, controller and processor, for what the pair has
        now.
        """
        request, generation, begun = self.request, self._pair.generation, self._begun
        self._begun = True
        if generation == self._generation:
            return
        self._generation = generation
        try:
            request.processor = self._make_processor()
        except OptionError as error:  # about ids that this model has not
            request.failure = error
        request.draft = make_draft(self._pair, self._options, request.limit, self._follows, self.seat)
        request.controller = make_controller(self._pair, self._options, request.draft)
        if begun:
            request.stats.swaps += 1
        else:
            request.stats.settings |= self._pair.settings | {"generation": generation}
        request.stats.timing.row_seconds = row_seconds(self._pair, request.controller)

    def _make_processor(self):
        from .processors import make_processor

        model = self._pair.model
        return make_processor(self._options, self._prompt_tokens, model.vocab_size, model.eos_ids, self._pair.tokenizer)

    def event(self, token: int | None, from_draft: bool) -> Event | None:
        """What the caller is told of an emitted token; with None of the end, if there is text left."""
        reason = self.request.finish_reason
        if token is None or reason is not None:
            self.seat.leave()
        text = self._keep(self._reader.take(end=reason is not None))
        if token is None and not text:
            return None
        event = Event(token, text, from_draft, reason, self.index)
        if self._options.callback is not None:
            self._options.callback(event)
        return event

    def ended(self) -> bool:
        """Whether the text is complete, after the last of its tokens; what was held back goes out."""
        if self.request.finish_reason is not None:
            self.event(None, False)
        return self.request.finish_reason is not None or self.request.failure is not None

    @property
    def failure(self) -> Exception | None:
        """Why the request could not go on, if so; with ``result``, what there was until then."""
        error = self.request.failure
        if error is not None:
            error.result = self.result
        return error

    def cancel(self) -> None:
        self._cancel.set()

    def close(self) -> None:
        """Ends the request if nothing else has, and gives back its memory."""
        if self.request.finish_reason is None:
            self.request.finish_reason = "cancelled"
        self.seat.leave()
        self._keep(self._reader.take(end=True))

    def _keep(self, text: str) -> str:
        self._texts.append(text)
        return text

    @property
    def result(self) -> Result:
        """What there is so far."""
        request = self.request
        tokens, memory = request.ids[self._prompt_tokens :], request.stats.memory
        request.stats.completion_tokens = len(tokens)
        memory.peak, memory.resident = peak_memory(), self.seat.resident_bytes
        memory.streamed_bytes, memory.released = self.seat.streamed_bytes, list(self.seat.released)
        return Result("".join(self._texts), tokens, request.finish_reason, request.stats, request.logprobs)


def _either(event, cancel):
    """One function for both ways in which a request is cancelled; ``cancel``: an event, a function, or None."""
    if cancel is None:
        return event.is_set
    also = cancel.is_set if hasattr(cancel, "is_set") else cancel
    if not callable(also):
        raise OptionError(f"cancel: expected an event or a function, got {show(cancel)}")
    return lambda: event.is_set() or bool(also())


def _threshold(options):
    from .threshold import Threshold

    if options.rule != "threshold":
        return None
    return Threshold(options.theta, options.theta_window, options.agreement)


def make_draft(pair, options, limit, follows, seat=None):
    """A lookup, or with a model behind it: what repeats itself is looked up, and the model is asked for the rest.

    ``seat``: the request's at the target, which a feature head reads.
    """
    from .drafts.chain import ChainDraft
    from .drafts.feature import FeatureDraft
    from .drafts.lookup import LookupDraft
    from .drafts.model import LEAST_REACH, ModelDraft
    from .faults import GuardedDraft

    name, model, draft = pair.draft if follows else options.draft, pair.model, None
    most, off = max(options.k if isinstance(options.k, int) else 8, 8), None
    if options.k == 0 or name == "none":
        pass
    elif name == "lookup":
        draft = LookupDraft(max_tokens=most)
    elif pair.draft_failure is not None:
        off = pair.draft_failure
    else:
        form = {"ids": pair.draft_ids, "tree": options.tree or 0, "confidence": options.confidence}
        form |= {"cost": pair.draft_cost, "costs": pair.draft_costs}
        form["reach"] = LEAST_REACH if options.k == "auto" else 0.0
        own, sampling = pair.draft_seat(limit), sampling_of(options)
        options_of_it = (model.vocab_size, most, sampling)
        if pair.draft_reads_features and seat is not None:
            seat.keep_features()
            of_model = FeatureDraft(own, seat, *options_of_it, **form)
        else:
            of_model = ModelDraft(own, *options_of_it, **form)
        draft = ChainDraft([LookupDraft(max_tokens=most), of_model])
    guarded = GuardedDraft(draft, model.vocab_size, model.eos_ids)
    if off is not None:
        guarded.let_go(off)
    pair.pressure.watch(guarded)
    return guarded


def sampling_of(options):
    from .request import Sampling

    return Sampling(options.temperature, options.top_k, options.top_p, options.min_p, options.seed)


def make_controller(pair, options, draft):
    from .controller import Auto, Fixed, worth_drafting
    from .costs import CostCurve

    if draft.draft is None or options.max_new_tokens < 2:
        return Fixed(0)
    if options.k != "auto":
        return Fixed(options.k, timeout=options.verify_timeout)
    costs, cost, steady = CostCurve.given(pair.costs), pair.draft_costs or pair.draft_cost, None
    # Where K has a say in what is drawn, or in what is lent, it must be the same again.
    if (options.temperature > 0 and options.seeded) or options.rule == "threshold":
        steady, cost = pair.nominal_costs
    if draft.draft.name == "lookup":
        cost = 0.0
    if not worth_drafting(options.max_new_tokens, steady or costs):  # of a lookup, which comes first
        most = options.max_new_tokens
        return Fixed(0, why=f"drafting does not pay for {most} tokens, however good the draft")
    return Auto(costs, cost, steady=steady, timeout=options.verify_timeout, tree=options.tree or 0)


def row_seconds(pair, controller) -> float | None:
    """Of a pass over one row, if that has been measured: where costs decide about K."""
    return pair.costs[0] if hasattr(controller, "costs") else None


def backend_name(model) -> str | None:
    """Which backend does the model's work, with its instruction set: "cpu/avx2", "cuda", "reference"."""
    from specdec_kernels import native, registry

    try:
        name = registry.candidates("linear_int8", getattr(model, "device_type", "cpu"))[0][0]
    except registry.BackendUnavailable:
        return None
    return f"{name}/{native.cpu.isa()}" if name == "cpu" else name
