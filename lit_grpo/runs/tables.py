"""Print tables that keep all their columns in a narrow terminal, and their whole text in a file."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from typing import IO, Any, cast

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

MINUTE, HOUR, DAY = 60, 3600, 86400
WIDTH_OF_FILES = 1000
"""Columns of output that does not go to a terminal; rich would take 80."""


def open_console() -> Console:
    """Return a console for stdout, as wide as the terminal or as ``COLUMNS`` says, if there is one.

    Nothing in the text is markup, and no number is coloured.
    """
    is_terminal = sys.stdout.isatty()
    return Console(
        file=None if is_terminal else cast(IO[str], _File()),
        width=None if is_terminal or "COLUMNS" in os.environ else WIDTH_OF_FILES,
        highlight=False,
        markup=False,
    )


class _File:
    """The current ``sys.stdout``, without the spaces that fill the lines of a table."""

    def write(self, text: str) -> int:
        return sys.stdout.write(re.sub(r" +(?=\n)", "", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)


def make_table(name: str) -> Table:
    """Return a table with one column, of names, which are wrapped if need be."""
    return Table(name, box=None, header_style="bold", pad_edge=False)


def add_numbers(table: Table, *names: str) -> None:
    """Add columns of numbers, which stay on one line with their units."""
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)


@dataclass(frozen=True, slots=True)
class TextTail:
    """A text on one line; if it is too long, its end, since the final answer is there."""

    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = one_line(self.text)
        if cell_len(shown) > options.max_width:
            while shown and cell_len(shown) >= options.max_width:
                shown = shown[1:]
            shown = f"…{shown}"
        yield Text(shown, no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        width = cell_len(one_line(self.text))
        return Measurement(min(8, width), width).with_maximum(options.max_width)


def one_line(text: str) -> str:
    """Return a text with single spaces, and with a dot for what is not printable."""
    joined = " ".join(text.split())
    return "".join(one if one.isprintable() else "·" for one in joined)


def duration(seconds: float) -> str:
    """Return a time for people: ``2.5 s``, ``3 min``, ``5.2 h``, ``1.5 days``."""
    if seconds < 90:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 2 * HOUR:
        return f"{seconds / MINUTE:.0f} min"
    return f"{seconds / HOUR:.1f} h" if seconds < 2 * DAY else f"{seconds / DAY:.1f} days"


def with_unit(number: float) -> str:
    """Return a number with three digits: ``1.54 B``."""
    for size, name in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if number >= size:
            return f"{number / size:.3g}{name}"
    return f"{number:.0f}"
