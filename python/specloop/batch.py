"""Requests that share passes: who runs, who waits, and what happens when memory does not suffice for all.

A request takes part from the round after it was let in until it has ended; then the next one comes in. How many run at
once is a matter of memory: as many as the model has room for. When an allocation fails nevertheless, after all has been
given back that can be (pressure.py), the younger half waits for the older one to end and is then filled from its
committed ids again; a request that can't even run alone fails, and the others go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from .errors import BudgetError, OutOfMemory
from .session import Session

MOST_AT_ONCE = 16  # more rows than this in a pass hardly make it cheaper per row on a CPU


def play(pair, sessions: Sequence[Session], *, size=None, whole=False) -> Iterator[tuple[Session, int, bool]]:
    """Yields (session, emitted id, whether a draft had it) until all have ended, at most ``size`` of them running.

    Decoding begins anew, from the committed ids, whenever a target or a draft was exchanged; with ``whole`` it ends
    there instead if the target was, and requests that were not through have no finish reason. What ended a request
    other than by itself is its ``request.failure``. Closing the generator ends all of them as cancelled.
    """
    from .decode import decode

    place = pair.place
    version, most = place.generation, size or MOST_AT_ONCE
    waiting, crew = deque(sessions), []
    running: dict = {}  # request -> session
    try:
        while not (whole and version != place.generation):
            _let_in(place, waiting, crew, running, most)
            if not crew:
                return
            generation = pair.generation
            moved = lambda generation=generation: pair.generation != generation
            for session in running.values():
                session.keep_up()
            try:
                for request, token, from_draft in decode(place, crew, lock=place.lock, moved=moved):
                    yield running[request], token, from_draft
                    if request.finish_reason is not None:
                        _see_off(running)
                        _let_in(place, waiting, crew, running, most)
            except (OutOfMemory, BudgetError) as error:
                most = _fewer(error, waiting, crew, running)
            _see_off(running)
            crew[:] = running
    finally:
        for session in sessions:
            session.seat.leave()


def _let_in(place, waiting, crew, running, most):
    """Those who wait, as long as there is room; one in any case."""
    while waiting and len(running) < most:
        session = waiting[0]
        empty = [other.seat.capacity for other in running.values() if other.seat.is_empty]  # have their room to come
        if running and place.room(max([session.seat.capacity, *empty])) <= len(empty):
            return
        waiting.popleft().keep_up()
        if session.request.stats.batch is not None:
            session.request.stats.batch.joined += 1
        running[session.request] = session
        crew.append(session.request)


def _see_off(running):
    """Those who have ended give back their memory; the loop drops them by itself before its next round."""
    for request in [r for r in running if r.finish_reason is not None or r.failure is not None]:
        running.pop(request).seat.leave()


def _fewer(error, waiting, crew, running):
    """Half as many from now on; returns how many."""
    if len(crew) == 1:
        crew[0].failure = error
        crew[0].end()
        return 1
    keep = len(crew) // 2
    for request in reversed(crew[keep:]):
        session = running.pop(request)
        session.seat.leave()
        if request.stats.batch is not None:
            request.stats.batch.put_off += 1
        waiting.appendleft(session)
    del crew[keep:]
    return keep
