"""A running request as an iterator of events."""

from __future__ import annotations

from collections.abc import Iterator

from .batch import play
from .session import Event, Result, Session


class Stream:
    """Iterate for its events, ``cancel()`` from any thread, ``result`` at any time.

    ``whole``: it ends, without a finish reason, when the target is exchanged.
    """

    def __init__(self, pair, session: Session, *, whole=False):
        self._session = session
        self._tokens = play(pair, [session], whole=whole)

    def cancel(self) -> None:
        """Ends the request within the round that is running; what was emitted stays."""
        self._session.cancel()

    def close(self) -> None:
        """Ends the request now. Call it from the thread that iterates."""
        self._tokens.close()
        self._session.close()

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        _, token, from_draft = next(self._tokens, (None, None, False))
        try:
            event = self._session.event(token, from_draft)
            failure = self._session.failure if event is None else None
        except BaseException as error:  # of the caller's callback
            self.close()
            failure = error
        if failure is None and event is None:
            raise StopIteration
        if isinstance(failure, StopIteration):  # which is not the end of the text
            raise RuntimeError("a function of the caller's raised StopIteration") from failure
        if failure is not None:
            raise failure
        return event

    @property
    def result(self) -> Result:
        """What there is so far; complete once the iteration has ended."""
        return self._session.result
