"""Summarize a run: its time, its tokens, and the first and the last value of a metric."""

from __future__ import annotations

from collections.abc import Sequence

from lit_grpo.runs.files.completions import count_tokens
from lit_grpo.runs.report.held_out import accuracies_compare
from lit_grpo.runs.report.history import ACCURACY, Run

UNKNOWN = "–"
LENGTH = "completions/mean_length"
"""A metric of every step that has sampled."""
HEADINGS = ("run", "steps", "time", "tokens", "accuracy", "reward")


def summary_row(run: Run) -> Sequence[str]:
    """Return the cells of a run under `HEADINGS`."""
    return (
        run.label,
        steps_cell(run),
        running_time([run]),
        num_tokens(run),
        change(run, ACCURACY),
        change(run, "reward/mean"),
    )


def change(run: Run, metric: str) -> str:
    """Return ``0.674 → 0.990``, or the last number if there is none to compare it with."""
    if not run.has(metric):
        return UNKNOWN
    first, last = run.change(metric)
    if metric == ACCURACY and last is not None and not accuracies_compare([run]):
        return f"{last:.3f}"
    return f"{first:.3f}" if last is None else f"{first:.3f} → {last:.3f}"


def steps_cell(run: Run) -> str:
    """Return the number of finished steps, or ``3 of 9`` if others have no row of metrics."""
    finished, lost = run.gaps.num_finished_steps, len(run.gaps.lost_steps)
    return f"{finished - lost} of {finished}" if lost else f"{run.num_steps}"


def running_time(runs: Sequence[Run]) -> str:
    """Return how long runs took together, with ``≥`` if the time of some steps is not known."""
    at_least = "≥ " if any(run.gaps.lacks_time for run in runs) else ""
    return f"{at_least}{clock(sum(run.seconds for run in runs))}"


def num_tokens(run: Run) -> str:
    """Return the number of tokens sampled in training."""
    tokens = _count_tokens(run)
    if tokens is None:
        return UNKNOWN
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if tokens >= size:
            return f"{tokens / size:.1f} {unit}"
    return f"{tokens:.0f}"


def _count_tokens(run: Run) -> float | None:
    """Count the tokens from the metrics of ``TimingLog``, or from the files of all completions."""
    if run.gaps.lost_steps:
        return count_tokens(run.path, range(run.gaps.num_finished_steps))
    if run.has("perf/tokens_per_second"):
        rates, seconds = run.values("perf/tokens_per_second"), run.values("timing/step_duration_s")
        return float((rates * seconds).sum())
    if not run.has(LENGTH):
        return None
    return count_tokens(run.path, (int(step) - 1 for step in run.values(LENGTH).index))


def gap_notes(runs: Sequence[Run]) -> list[str]:
    """Return a sentence for everything that runs have lost."""
    return [f"{run.label}: {note}" for run in runs for note in run.gaps.notes]


def token_notes(runs: Sequence[Run]) -> list[str]:
    """Return why the tokens of GRPO runs are not known."""
    without = [
        run.label
        for run in runs
        if run.has("reward/mean") and not run.gaps.lost_steps and num_tokens(run) == UNKNOWN
    ]
    if not without:
        return []
    return [
        f"The tokens of {' and '.join(without)} are not known: completions/ does not have the "
        "files of all steps, and the callback TimingLog, which counts them as well, is not in "
        "trainer.callbacks."
    ]


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
