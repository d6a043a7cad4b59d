"""Figures for people, in columns."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

WIDEST = 400  # columns; a row is a line, however narrow the terminal


def render(head: Sequence[str], groups: Iterable[Sequence[Sequence[str]]], *, left: Sequence[str] = ()) -> str:
    """A table as text: an empty line between two groups of rows, columns to the right but for those named ``left``."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in head:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for group in groups:
        for row in group:
            table.add_row(*map(Text, row))
        table.add_section()
    out = io.StringIO()
    Console(file=out, width=WIDEST, color_system=None, force_terminal=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).rstrip("\n")


def number(value, digits=2) -> str:
    """A dash for what is not known."""
    return "-" if value is None else f"{value:.{digits}f}"


def span(interval, digits=2) -> str:
    return "-" if interval is None else f"{interval[0]:.{digits}f}-{interval[1]:.{digits}f}"
