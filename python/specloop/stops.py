"""Finds stop strings in text that arrives in pieces.

The result does not depend on how the text is cut: it is that of reading one character at a time and stopping at the
first stop string to become complete (the longest, if several end there). Text is held back only while it could still
become part of a stop string.
"""

from __future__ import annotations

from collections.abc import Iterable

from .errors import OptionError


class StopMatcher:
    """``push`` pieces; what it returns is free to show. ``hit`` is the stop string that ended the text, or None."""

    def __init__(self, stops: Iterable[str] = ()):
        self.stops = check_stops(stops)
        self.hit: str | None = None
        self._held = ""
        self._reach = max((len(stop) for stop in self.stops), default=1) - 1

    def push(self, piece: str) -> str:
        """Text that can't become part of a stop string any more; after a hit always empty."""
        if self.hit is not None:
            return ""
        text = self._held + piece
        if not self.stops:
            return text
        found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self.stops if stop in text]
        if found:
            end, _, self.hit = min(found)
            self._held = ""
            return text[: end - len(self.hit)]
        keep = self._could_become_stop(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The end of the text: what was held back never became a stop string."""
        text, self._held = self._held, ""
        return text

    def _could_become_stop(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        for n in range(min(self._reach, len(text)), 0, -1):
            tail = text[len(text) - n :]
            if any(stop.startswith(tail) for stop in self.stops):
                return n
        return 0


def check_stops(stops) -> tuple[str, ...]:
    """The stop strings as a tuple; a single string counts as one."""
    if isinstance(stops, str):
        stops = (stops,)
    elif stops is not None and not isinstance(stops, Iterable):
        raise OptionError(f"stop: expected a string or several, got {type(stops).__name__}")
    stops = tuple(stops or ())
    for stop in stops:
        if not isinstance(stop, str):
            raise OptionError(f"stop: expected strings, got {type(stop).__name__}")
        if not stop:
            raise OptionError("stop: expected non-empty strings, got ''")
    return stops
