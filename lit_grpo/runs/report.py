"""The command ``lit-grpo report``: draw the curves of runs and print a summary.

Runs that started from each other are drawn as one training, other runs are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from lit_grpo.runs.comparison import describe, draw_comparison
from lit_grpo.runs.curves import ACCURACY, draw_curves
from lit_grpo.runs.failures import describe_failures
from lit_grpo.runs.history import Run, are_stages, load_runs
from lit_grpo.runs.tables import add_numbers, make_table, open_console


def report(run_dirs: Sequence[str | Path]) -> None:
    """Draw the curves of runs, print a summary, and say where the files are.

    Raises:
        UserError: a directory is not a run, or a run has no metrics.
    """
    runs = load_runs(run_dirs)
    console = open_console()
    if are_stages(runs):
        draw_curves(runs)
        accuracy, paths = _accuracy_line(runs), _file_paths(runs[-1])
        lines = [accuracy] if accuracy else []
    else:
        paths = {"Comparison": draw_comparison(runs)}
        lines = [describe(run) for run in runs if run.started_from is not None]
    console.print(_table(runs))
    failures = [line for run in runs for line in describe_failures(run)]
    for line in [*lines, *failures, *(f"{name:<13}{path}" for name, path in paths.items())]:
        console.print(line, soft_wrap=True)


def _accuracy_line(runs: Sequence[Run]) -> str:
    """Return ``Held-out accuracy 0.527 after sft/0 → 0.984 after grpo/0 (2 min 9 s)``.

    If a run went on after its last validation, the step of that validation is given.
    """
    measured = [run for run in runs if run.has(ACCURACY)]
    stages = [_accuracy_after(run) for run in measured]
    if len(runs) == 1:
        several = [run for run in measured if len(run.values(ACCURACY)) > 1]
        stages[:0] = [f"{run.ends(ACCURACY)[0]:.3f}" for run in several]
    seconds = sum(run.seconds for run in runs)
    return f"Held-out accuracy {' → '.join(stages)} ({_clock(seconds)})" if stages else ""


def _accuracy_after(run: Run) -> str:
    """Return ``0.984 after grpo/0``, or when it was measured if training went on after it."""
    when = run.when(ACCURACY)
    return f"{run.ends(ACCURACY)[1]:.3f} {f'{when} of' if when else 'after'} {run.label}"


def _table(runs: Sequence[Run]) -> Table:
    table = make_table("run")
    add_numbers(table, "steps", "time", "tokens", "accuracy", "reward")
    for run in runs:
        table.add_row(
            run.label,
            str(run.num_steps),
            _clock(run.seconds),
            _num_tokens(run),
            _change(run, ACCURACY),
            _change(run, "reward/mean"),
        )
    return table


def _change(run: Run, metric: str) -> str:
    if not run.has(metric):
        return "–"
    first, last = run.change(metric)
    return f"{first:.3f}" if last is None else f"{first:.3f} → {last:.3f}"


def _num_tokens(run: Run) -> str:
    """Return the number of tokens sampled in training, from the metrics of ``TimingLog``."""
    if not run.has("perf/tokens_per_second"):
        return "–"
    rates, seconds = run.values("perf/tokens_per_second"), run.values("timing/step_duration_s")
    tokens = (rates * seconds).sum()
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if tokens >= size:
            return f"{tokens / size:.1f} {unit}"
    return f"{tokens:.0f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _file_paths(run: Run) -> dict[str, Path]:
    names = {
        "Run": ".",
        "Curves": "curves.png",
        "Completions": "completions",
        "Checkpoints": "checkpoints",
        "Final model": "final",
    }
    return {name: run.path / part for name, part in names.items() if (run.path / part).exists()}
