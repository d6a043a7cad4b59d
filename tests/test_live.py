"""The live line on a terminal of few rows and columns: the text stays as it is, the line comes, changes and goes."""

import random
import re
from types import SimpleNamespace

import pytest

from specloop.live import REFRESH, View
from specloop.stats import Stats

COLUMNS, ROWS = 60, 6


class Screen:
    """A terminal, as far as the view uses one. It wraps late, as they do: with the character after the last column."""

    def __init__(self, columns=COLUMNS, rows=ROWS):
        self.rows, self.columns = [""] * rows, columns
        self.row = self.column = 0
        self.saved = None
        self.writes = 0

    def isatty(self):
        return True

    def fileno(self):
        raise ValueError("no file")  # so the view takes it to have 80 columns

    def flush(self):
        pass

    def write(self, text):
        self.writes += 1
        for piece in re.findall(r"\x1b\[[0-9]*[A-Z]|\x1b.|[^\x1b]", text, re.DOTALL):
            self._do(piece)

    def _do(self, piece):
        at_edge = self.columns - 1
        if piece == "\r":
            self.column = 0
        elif piece == "\n":
            self._down()
            self.column = 0
        elif piece == "\x1bD":
            self.column = min(self.column, at_edge)
            self._down()
        elif piece == "\x1b[A":
            self.row, self.column = max(0, self.row - 1), min(self.column, at_edge)
        elif piece == "\x1b[B":
            self.row, self.column = min(len(self.rows) - 1, self.row + 1), min(self.column, at_edge)
        elif piece == "\x1b7":
            self.saved = self.row, min(self.column, at_edge)
        elif piece == "\x1b8":
            self.row, self.column = self.saved
        elif piece == "\x1b[J":
            self.rows[self.row] = self.rows[self.row][: self.column]
            self.rows[self.row + 1 :] = [""] * (len(self.rows) - self.row - 1)
        else:
            assert piece.isprintable(), repr(piece)
            if self.column == self.columns:
                self._down()
                self.column = 0
            line = self.rows[self.row].ljust(self.column)
            self.rows[self.row] = line[: self.column] + piece + line[self.column + 1 :]
            self.column += 1

    def _down(self):
        if self.row == len(self.rows) - 1:
            self.rows = [*self.rows[1:], ""]
        else:
            self.row += 1


class Stream:
    def __init__(self):
        self.stats = Stats()

    @property
    def result(self):
        return SimpleNamespace(stats=self.stats)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def view_on(screen, *, shown=True, out=None, columns=COLUMNS):
    clock, stream = Clock(), Stream()
    return View(stream, shown=shown, out=out, err=screen, clock=clock), stream, clock


def texts(seed):
    rng = random.Random(seed)
    yield "x" * COLUMNS  # to the edge and no further
    for _ in range(60):
        yield rng.choice(["word ", "", "two\n", "\n\n", "a" * rng.randrange(90), "end." * 15])


@pytest.mark.parametrize("seed", range(8))
def test_the_text_is_that_without_a_line(seed, monkeypatch):
    monkeypatch.setattr("specloop.live.columns", lambda file: COLUMNS)
    screen, alone = Screen(), Screen()
    view, stream, clock = view_on(screen, out=screen)
    seen = 0
    with view:
        for text in texts(seed):
            clock.now += 0.09
            stream.stats.speculation.add(3, 1, 2, 0.05)
            view.write(text)
            alone.write(text)
            assert screen.rows[screen.row].rstrip() == alone.rows[alone.row].rstrip()
            if view._column < COLUMNS and view._line:
                assert "tokens" in screen.rows[screen.row + 1] and not any(screen.rows[screen.row + 2 :])
                seen += 1
    assert seen > 20
    # The line may have made one row of room at the bottom; apart from that nothing is left of it.
    kept = [line.rstrip() for line in screen.rows[: screen.row + 1]]
    assert [line.rstrip() for line in alone.rows[: alone.row + 1]][-len(kept) :] == kept
    assert not any(screen.rows[screen.row + 1 :])


def test_what_the_line_says():
    screen = Screen(columns=200)
    view, stream, clock = view_on(screen)
    counts = stream.stats.speculation
    counts.threshold = SimpleNamespace(theta=0.4321)
    for i in range(40):
        clock.now += 0.1
        counts.add(4, 3 if i < 20 else 1, 5 if i < 20 else 2, 0.1)
        view.write("x")
    line = screen.rows[1].rstrip()
    assert line.startswith("138 tokens  20.0 tokens/s  K 4  accepted 50%  theta 0.432  ")  # of the last two seconds
    assert re.search(r"  \d+ MB$", line)
    counts.off_reason = "it failed\n\x1b[31m\N{WARNING SIGN}"
    clock.now += 1
    view.write("x")
    assert "\x1b[31m" not in view._line and view._line.isprintable() and len(view._line) < 80


def test_only_a_few_times_a_second():
    screen = Screen()
    view, _, clock = view_on(screen)
    worked_out = []
    view._status = lambda stats, now: worked_out.append(now) or "line"
    for _ in range(1000):
        clock.now += 0.01
        view.write("")
    assert 10 / REFRESH * 0.9 <= len(worked_out) <= 10 / REFRESH
    assert screen.writes <= 2 * len(worked_out)  # no text, so nothing else to write


@pytest.mark.parametrize("why", ["not asked", "no terminal", "dumb", "closed"])
def test_no_line_where_nobody_looks(why, monkeypatch):
    screen, out = Screen(), Screen()
    if why == "no terminal":
        screen.isatty = lambda: False
    if why == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    view, stream, clock = view_on(screen, shown=why != "not asked", out=out)
    if why == "closed":
        view = View(stream, shown=False, out=None, err=screen, clock=clock)
    with view:
        for _ in range(20):
            clock.now += 1
            view.write("a")
    assert screen.writes == 0
    assert out.rows[0] == ("" if why == "closed" else "a" * 20)
