"""The live view of ``--stats``: one line below the text, on stderr, if that is a terminal.

The text goes to stdout token by token, most often to the same terminal, so the cursor stays where the text ends. The
line lives on the row below: it is erased before a piece of text is written and put back behind it. What it says is
worked out anew a few times a second only, so that a token pays for a few short writes and nothing else.
"""

from __future__ import annotations

import os
import sys
import time

REFRESH = 0.25  # seconds
WINDOW = 2.0  # seconds over which speed and acceptance are shown
ERASE_BELOW = "\x1b[J"
# IND and up: makes room where the cursor is on the last row, and keeps its column. Save, down, start of the row.
BELOW, BACK = "\x1bD\x1b[A\x1b7\x1b[B\r", "\x1b8"


class View:
    """Writes a stream's text and, if ``shown``, its live line. Use as a context manager; the line is gone at its end.

    ``stream``: of :meth:`Pair.stream`. ``out``: where the text goes, None = nowhere. ``clock``: seconds.
    """

    def __init__(self, stream, *, shown, out, err=None, clock=time.perf_counter):
        self.stream, self.out, self.err, self.clock = stream, out, sys.stderr if err is None else err, clock
        self.shown = shown and is_terminal(self.err)
        self._line, self._due, self._past = "", clock() + REFRESH, []

    def write(self, text: str) -> None:
        """A piece of the text, perhaps empty: call it once per token."""
        if self.shown:
            now = self.clock()
            if now >= self._due:
                self._due = now + REFRESH
                self._line = self._status(now)
            elif not text or not self._line:
                return self._put(text)
            self.err.write(ERASE_BELOW)
            self.err.flush()
        self._put(text)
        if self.shown:
            self.err.write(BELOW + self._line + BACK)
            self.err.flush()

    def _put(self, text):
        if self.out is not None and text:
            self.out.write(text)
            self.out.flush()

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_) -> None:
        if self.shown and self._line:
            self.err.write(ERASE_BELOW)
            self.err.flush()

    def _status(self, now) -> str:
        """One line that fits."""
        stats = self.stream.stats
        counts = stats.speculation
        self._past.append((now, counts.tokens, counts.evaluated, counts.accepted))
        while len(self._past) > 2 and now - self._past[0][0] > WINDOW:
            del self._past[0]
        then, tokens, evaluated, accepted = self._past[0]
        spent, made = now - then, counts.tokens - tokens
        judged, taken = counts.evaluated - evaluated, counts.accepted - accepted
        parts = [
            f"{counts.tokens} tokens",
            f"{made / spent:.1f} tokens/s" if spent > 0 else "",
            f"K {counts.k_history[-1]}" if counts.k_history else "",
            f"accepted {taken / judged:.0%}" if judged else "",
            "" if counts.threshold is None else f"theta {counts.threshold.theta:.3f}",
            "" if (size := resident_memory()) is None else f"{size / 1e6:.0f} MB",
            f"off: {counts.off_reason}" if counts.off_reason else "",
        ]
        line = "  ".join(filter(None, parts))
        return "".join(c if c.isascii() and c.isprintable() else "?" for c in line)[: _columns(self.err) - 1]


def is_terminal(file) -> bool:
    """Whether lines can be drawn there."""
    return file is not None and file.isatty() and os.environ.get("TERM", "") != "dumb"


def _columns(file) -> int:
    try:
        return os.get_terminal_size(file.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def resident_memory() -> int | None:
    """Bytes that this process holds now, mapped files included; None where that is not told."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
