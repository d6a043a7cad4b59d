"""The live view of ``--stats``: one line below the text, on stderr, if that is a terminal.

The text goes to stdout token by token, most often to the same terminal, so the cursor has to stay where the text ends.
The line lives on the row below: it is erased before a piece of text is written and put back behind it. What it says is
worked out anew a few times a second only, so a token pays for two short writes and no more.
"""

from __future__ import annotations

import os
import sys
import time
import unicodedata

REFRESH = 0.25  # seconds
WINDOW = 2.0  # seconds over which speed and acceptance are shown
ERASE = "\x1b[J"  # from the cursor to the end of the screen
# Down and up again makes room where the cursor is on the last row, and keeps its column. Save, down, start of the row.
BELOW, BACK = "\x1bD\x1b[A\x1b7\x1b[B\r", "\x1b8"


class View:
    """Writes a stream's text and, if ``shown``, the live line. As a context manager it takes the line away at its end.

    ``stream``: of :meth:`Pair.stream`. ``out``: a file for the text, None = it is not written. ``err``: a file for the
    line. ``clock``: seconds.
    """

    def __init__(self, stream, *, shown, out, err=None, clock=time.perf_counter):
        self.stream, self.out, self.err, self.clock = stream, out, sys.stderr if err is None else err, clock
        self.shown = shown and is_terminal(self.err)
        self._together = self.shown and is_terminal(out)
        self._line, self._due, self._past = "", clock() + REFRESH, []
        self._column, self._columns = 0, columns(self.err) if self.shown else 80

    def write(self, text: str) -> None:
        """A piece of the text, perhaps empty: call it once per token."""
        due = self.shown and self.clock() >= self._due
        if due:
            self._refresh()
        drawn = self._line and (due or text)
        if drawn:
            self._tell(ERASE)
        if self.out is not None and text:
            self.out.write(text)
            self.out.flush()
            if self._together:
                self._advance(text)
        # At the right edge a terminal owes a line break, which a saved position does not remember.
        if drawn and self._column < self._columns:
            self._tell(BELOW + self._line + BACK)

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_) -> None:
        if self._line:
            self._tell(ERASE)

    def _tell(self, text):
        self.err.write(text)
        self.err.flush()

    def _refresh(self):
        now = self.clock()
        self._due, self._columns = now + REFRESH, columns(self.err)
        line = self._status(self.stream.result.stats, now)
        self._line = "".join(c if c.isascii() and c.isprintable() else "?" for c in line)[: self._columns - 1]

    def _status(self, stats, now) -> str:
        counts = stats.speculation
        self._past.append((now, counts.tokens, counts.evaluated, counts.accepted))
        while len(self._past) > 2 and now - self._past[0][0] > WINDOW:
            del self._past[0]
        spent, made, judged, taken = (new - old for new, old in zip(self._past[-1], self._past[0], strict=True))
        parts = [
            f"{counts.tokens} tokens",
            f"{made / spent:.1f} tokens/s" if spent > 0 else "",
            f"K {counts.k_history[-1]}" if counts.k_history else "",
            f"accepted {taken / judged:.0%}" if judged else "",
            "" if counts.threshold is None else f"theta {counts.threshold.theta:.3f}",
            "" if (size := resident_memory()) is None else f"{size / 1e6:.0f} MB",
            f"off: {counts.off_reason}" if counts.off_reason else "",
        ]
        return "  ".join(filter(None, parts))

    def _advance(self, text):
        """Where the cursor is after ``text``: the number of columns that are taken in its row."""
        for character in text:
            if character in "\n\r":
                self._column = 0
                continue
            width = 8 - self._column % 8 if character == "\t" else _width(character)
            self._column = width if self._column + width > self._columns else self._column + width


def _width(character) -> int:
    if unicodedata.combining(character) or not character.isprintable():
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def is_terminal(file) -> bool:
    """Whether lines can be drawn there."""
    return file is not None and file.isatty() and os.environ.get("TERM", "") != "dumb"


def columns(file) -> int:
    """Of the terminal."""
    try:
        return os.get_terminal_size(file.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def resident_memory() -> int | None:
    """Bytes that this process holds now, mapped files included; None where nobody tells."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
