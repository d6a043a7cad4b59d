"""The decode loop: draft, verify, commit, adapt. Plain decoding is the same loop with K = 0.

``request.ids`` (prompt, then what was emitted) is the single truth. The cache holds a prefix of it, at most all of it
but the last id, the *pending* one; what it lacks comes first in the next pass. The draft is told of committed ids only.
So decoding can end after any round and begin again, with another cache or another model: it fills the cache from the
ids. One round of a request:

    K drafts d_1..d_K  ->  forward(pending, d_1, .., d_K) -> K + 1 rows  ->  verify -> d_1..d_tau and one more token

Requests that share a round share its pass, so each block of weights is read once for the rows of all of them. They do
not see each other: a row's logits depend on its own ids alone, and so does the verdict on it.

Leviathan et al. 2023 and Chen et al. 2023; the tokens are those (T = 0) or have the law (T > 0) of plain decoding.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from .acceptance import judge
from .controller import plan
from .errors import ModelFault
from .models.base import Part, accept, forward_parts
from .request import Request

PREFILL_CHUNK = 256  # rows per pass over the prompt: bounds scratch memory and the wait for a cancel
CATCH_UP = 16  # a cache that lacks so few ids, of a tree say, gets them with the round; a prompt is read by itself


def decode(target, crew: list[Request], *, lock=None, moved=lambda: False) -> Iterator[tuple[Request, int, bool]]:
    """Yields (request, emitted id, whether a draft had it), id by id, until no request is left or ``moved()`` is true.

    ``crew``: requests may be appended to it at any time, from any thread, and take part from the next round on; those
    that have ended (``finish_reason`` or ``failure`` is set) are removed. Every id is in ``request.ids`` before it is
    yielded and none is there that was not; the caller may close the generator at any time, which cancels the requests.
    ``lock`` is held while the target's scratch memory is in use, so several loops may take turns on one model; in it
    ``moved`` is asked again before each pass. What a pass raises comes out of here, all requests as after their last
    round: with the same crew another call goes on.
    """
    lock = lock or contextlib.nullcontext()
    begun: list[Request] = []
    try:
        while not moved():
            begun += [r for r in list(crew) if r not in begun]
            for request in [r for r in begun if not r.may_go_on()]:
                crew.remove(request)
                begun.remove(request)
                request.end()
            if not crew:
                return
            now = list(begun)
            late = [r for r in now if r.behind > (CATCH_UP if r.cache.length else 0)]
            if late:
                _read(target, late[0], lock, moved)
            yield from _round(target, [r for r in now if r not in late], lock, moved)
    except GeneratorExit:
        for request in begun:
            request.finish_reason = request.finish_reason or "cancelled"
        raise
    finally:
        for request in begun:
            request.end()


def _read(target, request, lock, moved):
    """Feeds a piece of what the cache lacks, usually of the prompt; the last id stays pending."""
    started, length = time.perf_counter(), request.cache.length
    with lock:
        if not moved():
            tokens = request.ids[length : min(length + PREFILL_CHUNK, len(request.ids) - 1)]
            forward_parts(target, [Part(request.cache, tokens, 0)])
    timing = request.stats.timing
    timing.prefill_seconds = (timing.prefill_seconds or 0.0) + time.perf_counter() - started


def _round(target, crew, lock, moved):
    """One pass for all of ``crew``."""
    if not crew:
        return
    clock = _Clock(crew)
    try:
        outlooks = [_outlook(request) for request in crew]
        wanted = plan([request.controller for request in crew], outlooks)
        proposals = [request.draft.propose(k) for request, k in zip(crew, wanted, strict=True)]
        parts = [_part(request, proposal) for request, proposal in zip(crew, proposals, strict=True)]
        with lock:
            started = time.perf_counter()
            if moved():
                return
            verdicts = judge(forward_parts(target, parts), crew, proposals)
        seconds, rows = time.perf_counter() - started, sum(len(part.tokens) for part in parts)
        if crew[0].stats.batch is not None:
            crew[0].stats.batch.add(len(crew), rows, seconds)
        for request, outlook, proposal, verdict in zip(crew, outlooks, proposals, verdicts, strict=True):
            yield from _commit(request, outlook, proposal, verdict, target.eos_ids, (seconds, rows), clock)
    finally:
        clock.stop()
        for request in crew:  # nothing stays that is not committed, whatever happened
            request.cache.truncate(min(request.cache.length, len(request.ids) - 1))


def _outlook(request):
    request.draft.round()
    strength, limit = request.draft.outlook(request.ids)
    return strength, min(limit, request.room)


def _part(request, proposal):
    tokens = request.ids[request.cache.length :] + proposal.tokens
    return Part(request.cache, tokens, len(proposal.tokens) + 1, proposal.parents)


def _commit(request, outlook, proposal, verdict, eos_ids, cost, clock):
    """The verdict's tokens become text, one by one, as long as the text does not end and the caller wants more."""
    ids, before, refused = request.ids, len(request.ids), bool(len(proposal)) and not verdict.accepted
    try:
        for i, token in enumerate(verdict.tokens):
            request.take(token, eos_ids, refused)
            clock.stop()
            yield request, token, i < verdict.accepted
            clock.start()
            if not request.may_go_on():
                break
    finally:
        committed = len(ids) - before
        if proposal.parents is not None:
            accept(request.cache, verdict.path[:committed])
        verdict.note(request, committed)
        request.count(proposal, verdict.accepted, committed, cost[0])
    request.draft.append(ids[before:])
    if committed == len(verdict.tokens):
        request.observe(outlook, proposal.depth, verdict.accepted, *cost)
    if verdict.stuck and not committed and request.finish_reason is None:  # else the next round says so, or why
        where = f"no token at position {len(ids)} has a probability"
        fault = ModelFault(f"{where}: the model's logits are NaN or -inf, or all ids are forbidden")
        request.failure = verdict.error or fault


class _Clock:
    """Adds up the time that decoding takes, without the time that the caller spends on a token."""

    def __init__(self, crew):
        self.timings = [request.stats.timing for request in crew]
        self.start()

    def start(self):
        self.started = time.perf_counter()

    def stop(self):
        if self.started is not None:
            seconds, self.started = time.perf_counter() - self.started, None
            for timing in self.timings:
                timing.decode_seconds += seconds
