"""The decode loop: draft, verify, commit, adapt. Plain decoding is the same loop with K = 0.

``request.ids`` (prompt, then what was emitted) is the single truth. The cache always holds all of it but the last id,
the *pending* one, whose row comes first in the next pass; the draft is told of committed ids only. So decoding can end
after any round and begin again, with another cache or another model: it fills the cache from the ids. One round:

    K drafts d_1..d_K  ->  forward(pending, d_1, .., d_K) -> K + 1 rows  ->  verify -> d_1..d_tau and one more token

Leviathan et al. 2023 and Chen et al. 2023; the tokens are those (T = 0) or have the law (T > 0) of plain decoding.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from specdec_kernels import verify

from .errors import ModelFault
from .faults import GuardedDraft
from .models.base import Cache, Model
from .stats import Stats

PREFILL_CHUNK = 256  # rows per pass over the prompt: bounds scratch memory and the wait for a cancel
NO_CANDIDATE, BAD_VALUE = 2, 4  # flag bits of a verdict


@dataclass(frozen=True, slots=True)
class Sampling:
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


@dataclass(slots=True)
class Request:
    """One text in the making."""

    ids: list[int]  # committed: the prompt, then every emitted id
    limit: int  # most ids, prompt included
    sampling: Sampling = Sampling()
    stop: Callable[[int], bool] = lambda token: False  # sees every emitted id once; True = the text ends with it
    cancelled: Callable[[], bool] = lambda: False
    moved: Callable[[], bool] = lambda: False  # True: decoding is to end after this round, and to begin again elsewhere
    finish_reason: str | None = None  # "stop", "length" or "cancelled" once it has ended
    stats: Stats = field(default_factory=Stats)


def decode(
    model: Model, cache: Cache, request: Request, draft: GuardedDraft, controller, lock=None
) -> Iterator[tuple[int, bool]]:
    """Yields (emitted id, whether the draft had it) one by one until ``request.finish_reason`` is set or it has moved.

    Every id is in ``request.ids`` before it is yielded and none is there that was not; the caller may close the
    generator at any time. ``lock`` is held while the model's scratch memory is in use, so several requests may take
    turns on one model; in it ``request.moved`` is asked again before each pass. Raises ModelFault if the logits leave
    no token to emit.
    """
    ids, stats, lock = request.ids, request.stats, lock or contextlib.nullcontext()
    clock = _Clock(stats.timing)
    try:
        _prefill(model, cache, request, lock)
        while _may_go_on(request) and not request.moved():
            clock.start()
            draft.round()
            outlook = draft.outlook(ids)
            k = min(controller.choose(outlook), request.limit - len(ids) - 1)
            proposal = draft.propose(k)
            drafts = proposal.tokens

            started = time.perf_counter()
            with lock:
                if request.moved():
                    break
                tokens, accepted, flags = _pass(model, cache, ids, proposal, request.sampling)
            seconds = time.perf_counter() - started

            before = len(ids)
            try:
                for i, token in enumerate(tokens):
                    ids.append(token)
                    request.finish_reason = _ends(model, request, token)
                    clock.stop()
                    yield token, i < accepted
                    clock.start()
                    if request.finish_reason or not _may_go_on(request):
                        break
            finally:
                committed = len(ids) - before
                cache.truncate(len(ids) - 1)
                stats.speculation.add(len(drafts), accepted, committed, seconds)
            draft.append(ids[before:])
            if committed == len(tokens):  # a round that was cut says nothing about the drafts behind the cut
                controller.observe(outlook, len(drafts), accepted)
            if flags & (NO_CANDIDATE | BAD_VALUE) and not request.finish_reason:
                raise ModelFault(
                    f"no token at position {len(ids)} has a probability: the model's logits are NaN or -inf"
                )
    except GeneratorExit:
        request.finish_reason = request.finish_reason or "cancelled"
        raise
    finally:
        clock.stop()
        stats.speculation.end(draft, controller)


def _prefill(model, cache, request, lock):
    """Fills the cache with all of the prompt but its last id."""
    started = time.perf_counter()
    last = len(request.ids) - 1
    while cache.length < last and _may_go_on(request):
        with lock:
            if request.moved():
                break
            model.forward(request.ids[cache.length : min(cache.length + PREFILL_CHUNK, last)], cache, last=0)
    timing = request.stats.timing
    timing.prefill_seconds = (timing.prefill_seconds or 0.0) + time.perf_counter() - started


def _pass(model, cache, ids, proposal, sampling):
    """The target's verdict on the drafts after the committed ``ids``."""
    logits = model.forward([ids[-1], *proposal.tokens], cache, last=len(proposal) + 1)
    return _verify(logits, proposal, len(ids), sampling)


def _may_go_on(request) -> bool:
    """False, with the reason noted, if the request must not begin another token."""
    if request.finish_reason is None:
        if request.cancelled():
            request.finish_reason = "cancelled"
        elif len(request.ids) >= request.limit:
            request.finish_reason = "length"
    return request.finish_reason is None


def _ends(model, request, token) -> str | None:
    """The reason why the text ends with this token, or None."""
    if token in model.eos_ids or request.stop(token):
        return "stop"
    return "length" if len(request.ids) >= request.limit else None


def _verify(logits, proposal, position, sampling):
    """One request's verdict as Python numbers: (emitted tokens, accepted drafts, flags)."""
    drafts = proposal.tokens
    vector = lambda values, dtype=torch.int64: torch.tensor(values, dtype=dtype, device=logits.device)
    verdict = verify(
        logits,
        vector(drafts),
        vector([0, len(drafts)], torch.int32),
        draft_logits=proposal.logits,
        draft_ids=proposal.ids,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=vector([sampling.seed]),
        position=vector([position]),
        max_drafts=len(drafts),
    )
    tokens, accepted, flags = verdict.tokens[0].tolist(), verdict.num_accepted.item(), verdict.flags.item()
    return [token for token in tokens if token >= 0], accepted, flags


class _Clock:
    """Adds up the time that decoding takes, without the time that the caller spends on a token."""

    def __init__(self, timing):
        self.timing, self.started = timing, None

    def start(self):
        self.started = time.perf_counter()

    def stop(self):
        if self.started is not None:
            self.timing.decode_seconds += time.perf_counter() - self.started
            self.started = None
