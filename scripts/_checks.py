"""Check what runs have left behind: statements, whether each holds, and the figures that decide."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.table import Table

Checks = dict[str, tuple[bool, str]]
"""Statement -> (whether it holds, the figures that decide)."""


def read_run(run_dir: Path) -> dict[str, pd.DataFrame]:
    """Return ``metrics``, a row per rollout step, and ``completions``, a row per completion."""
    return {
        "metrics": step_metrics(run_dir),
        "completions": pd.concat(map(pd.read_parquet, sorted(run_dir.glob("completions/*")))),
    }


def step_metrics(run_dir: Path) -> pd.DataFrame:
    """Return the metrics of the rollout steps, without a validation before training."""
    metrics = pd.read_csv(run_dir / "metrics.csv")
    return metrics[metrics["step"] >= 0].reset_index(drop=True)


def num_steps(metrics: Path) -> int:
    """Return how many rollout steps a file of metrics has; 0 if it is not there."""
    rows = metrics.read_text().splitlines()[1:] if metrics.exists() else []
    return sum(not row.startswith("-1,") for row in rows)


def failed_checks(checks: Checks) -> set[str]:
    """Return the statements that do not hold."""
    return {statement for statement, (holds, _) in checks.items() if not holds}


def print_checks(checks: Checks) -> int:
    """Print all checks; return the exit code, 0 if all hold."""
    table = Table(box=None)
    for column in ("", "holds", "seen"):
        table.add_column(column)
    for statement, (holds, seen) in checks.items():
        table.add_row(statement, "[green]yes" if holds else "[red]no", seen)
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    return 1 if failed_checks(checks) else 0
