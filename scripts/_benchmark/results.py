"""Results of the benchmark: judge them, save them as JSON and print them as tables."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import cache
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

LIBRARIES = ("torch", "transformers", "trl", "lightning")
PIPE_WIDTH = 140
HEAD = ["case", "ours", "other", "ratio", "target", "met"]

Row = dict[str, Any]


@cache
def machine() -> Row:
    """Describe the machine and the libraries."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "python": platform.python_version(),
    } | {name: version(name) for name in LIBRARIES}


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


@dataclass(frozen=True, kw_only=True)
class Result:
    """One figure: this project's number, another one, and the target for their ratio.

    Args:
        case: The workload, or the part of it that was measured.
        against: What the other number was measured on.
        target: The largest ratio that meets the target; None without a target.
        details: Further numbers: name of a row -> column -> value.
    """

    figure: str
    case: str
    against: str
    ours: float
    other: float
    unit: str
    target: float | None = None
    details: dict[str, Row] = field(default_factory=dict)
    date: str = field(default_factory=lambda: date.today().isoformat())
    command: str = field(
        default_factory=lambda: shlex.join(["python", "scripts/benchmark.py", *sys.argv[1:]])
    )
    machine: Row = field(default_factory=machine)

    @property
    def ratio(self) -> float:
        return self.ours / self.other

    @property
    def is_met(self) -> bool | None:
        return None if self.target is None else self.ratio <= self.target

    def to_row(self) -> Row:
        return asdict(self) | {"ratio": self.ratio, "is_met": self.is_met}


def save(rows: Iterable[Row], path: Path) -> None:
    """Add rows to a file; a row replaces the earlier one of its figure and case."""
    earlier = json.loads(path.read_text()) if path.exists() else []
    by_name = {(row["figure"], row["case"]): row for row in [*earlier, *rows]}
    path.write_text(json.dumps(list(by_name.values()), indent=1) + "\n")


def print_tables(rows: Sequence[Row]) -> None:
    """Print tables to the terminal; into a pipe they are wide enough for all columns."""
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    for title, head, cells in tables(rows):
        table = Table(*head, title=title, title_justify="left")
        for line in cells:
            table.add_row(*line)
        console.print(table)


def markdown(rows: Sequence[Row]) -> str:
    """Return the tables in Markdown, with the commands that measured them."""
    parts = []
    for title, head, cells in tables(rows):
        lines = [head, ["---"] * len(head), *cells]
        parts.append("\n".join([title, "", *(f"| {' | '.join(line)} |" for line in lines)]))
    runs = {(row["date"], row["command"], json.dumps(row["machine"])) for row in rows}
    for day, command, where in sorted(runs):
        described = ", ".join(f"{k} {v}" for k, v in json.loads(where).items() if v is not None)
        parts.append(f"`{command}` on {day}: {described}.")
    return "\n\n".join(parts) + "\n"


def tables(rows: Sequence[Row]) -> Iterable[tuple[str, list[str], list[list[str]]]]:
    """Yield title, head and cells of a table per figure, and of one for its details."""
    for figure, group in groupby(sorted(rows, key=lambda row: row["figure"]), _figure):
        of_figure = list(group)
        title = f"{figure}: against {of_figure[0]['against']}"
        yield title, HEAD, [_cells(row) for row in of_figure]
        details = [
            (f"{row['case']} {name}", values)
            for row in of_figure
            for name, values in row["details"].items()
        ]
        if details:
            columns = list(dict.fromkeys(key for _, values in details for key in values))
            cells = [
                [name, *(_number(values.get(column)) for column in columns)]
                for name, values in details
            ]
            yield f"{figure}: details", ["", *columns], cells


def _figure(row: Row) -> str:
    return str(row["figure"])


def _cells(row: Row) -> list[str]:
    met = {True: "yes", False: "no", None: ""}[row["is_met"]]
    unit = row["unit"]
    ours, other = (f"{_number(row[name])} {unit}" for name in ("ours", "other"))
    target = "" if row["target"] is None else f"≤ {_number(row['target'])}"
    return [row["case"], ours, other, _number(row["ratio"]), target, met]


def _number(value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
