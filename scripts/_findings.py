"""What a script proves from what runs left behind: statements, whether each holds, and the figures
that say so. Trains nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table

Findings = dict[str, tuple[bool, str]]
"""Statement -> whether it holds, and by which figures."""


def read_run(run_dir: Path) -> dict[str, pd.DataFrame]:
    """``metrics`` with a row a rollout step, and ``completions`` with one a completion."""
    return {
        "metrics": pd.read_csv(run_dir / "metrics.csv"),
        "completions": pd.concat(map(pd.read_parquet, sorted(run_dir.glob("completions/*")))),
    }


def denied(findings: Findings) -> set[str]:
    """The statements that do not hold."""
    return {statement for statement, (holds, _) in findings.items() if not holds}


def exit_code_of(findings: Findings) -> int:
    """Print them; 0 where all hold."""
    table = Table(box=None)
    for column in ("", "holds", "seen"):
        table.add_column(column)
    for statement, (holds, seen) in findings.items():
        table.add_row(statement, "[green]yes" if holds else "[red]no", seen)
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    return 1 if denied(findings) else 0
