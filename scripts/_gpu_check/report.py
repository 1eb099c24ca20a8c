"""Print what was found, to the terminal and as Markdown."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from _gpu_check.findings import Record
from rich.console import Console
from rich.table import Table

PIPE_WIDTH = 160
COLOURS = {"passed": "green", "failed": "bold red", "skipped": "yellow"}

Cells = tuple[str, list[str], list[list[str]]]
"""Title, head and rows of a table."""


def tables(records: Sequence[Record]) -> Iterator[Cells]:
    """Yield the findings, the figures, and the tables of the parts."""
    findings = [
        [one["part"], one["name"], one["status"], one["detail"]]
        for one in records
        if one["kind"] == "finding"
    ]
    yield "checks", ["part", "check", "result", "detail"], findings
    figures = [
        [one["part"], one["name"], _number(one["value"]), one["unit"], one["how"]]
        for one in records
        if one["kind"] == "figure"
    ]
    yield "figures", ["part", "figure", "value", "unit", "how"], figures
    for one in records:
        if one["kind"] == "table" and one["rows"]:
            yield one["title"], one["head"], one["rows"]


def _number(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"


def print_report(found: dict[str, Any]) -> None:
    """Print all tables; into a pipe they are wide enough for all columns."""
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    for title, head, rows in tables(found["records"]):
        table = Table(*head, title=title, title_justify="left")
        for row in rows:
            table.add_row(*row, style=COLOURS.get(row[2]) if title == "checks" else None)
        console.print(table)


def markdown(found: dict[str, Any]) -> str:
    """Return the tables for docs/performance.md."""
    parts = [f"`{found['command']}` on {found['date']}: {found['what']}"]
    for title, head, rows in tables(found["records"]):
        lines = [head, ["---"] * len(head), *rows]
        escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
        parts.append("\n".join([title, "", *(f"| {' | '.join(line)} |" for line in escaped)]))
    return "\n\n".join(parts) + "\n"


def failures(records: Sequence[Record]) -> list[Record]:
    return [one for one in records if one["kind"] == "finding" and one["status"] == "failed"]
