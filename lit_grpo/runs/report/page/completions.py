"""Choose completions for the page: whole groups of some steps, with their scores.

A page with all completions of a long run would be too large for a browser.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lit_grpo.runs.files.completions import files_by_step
from lit_grpo.runs.report.history import Run
from lit_grpo.types import Outcome

MAX_STEPS = 20
NUM_NEWEST = 5
"""Newest steps among the ones shown; the others are spread evenly over the run."""
MAX_ROWS = 1000
"""Rows on the page, over all its runs."""
MAX_CHARACTERS = 2000
"""Limit of a prompt or a completion; a longer one's start and end are shown."""
MAX_DETAIL = 300

COLUMNS = (
    "prompt_id", "prompt", "completion", "finish_reason", "num_tokens", "answer", "reward", "valid",
    "advantage",
)  # fmt: skip
GROUP = "group"
READ = (*COLUMNS, GROUP)
OF_REWARDS = ("score/", "outcome/", "detail/")


@dataclass(slots=True)
class Sample:
    """Completions of all runs of a page."""

    prompts: list[str] = field(default_factory=list)
    """Each of them once; a row has its number."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    rewards: list[str] = field(default_factory=list)
    """Names of the single rewards."""
    notes: list[str] = field(default_factory=list)
    """How many of how many are shown, a sentence for each run."""


def sample_completions(runs: Sequence[Run]) -> Sample:
    """Return completions of the newest steps and of steps spread evenly, the newest step first."""
    found = {number: _files(run) for number, run in enumerate(runs)}
    found = {number: files for number, files in found.items() if files}
    sample = Sample()
    for number, files in found.items():
        steps = choose_steps(sorted(files))
        num_rows = max(1, MAX_ROWS // len(found) // len(steps))
        num_all = num_shown = num_damaged = 0
        for step in reversed(steps):
            rows, damaged = _read(files[step])
            chosen = choose_groups(rows, num_rows)
            _add(sample, chosen, run=number, step=step + 1, file=files[step][0].name)
            num_all, num_shown = num_all + len(rows), num_shown + len(chosen)
            num_damaged += damaged
        name = f"{runs[number].label}: " if len(runs) > 1 else ""
        sample.notes.append(
            f"{name}{num_shown:,} of the {num_all:,} completions of {len(steps)} of {len(files)} "
            f"steps are shown.{_damaged(num_damaged)}"
        )
    return sample


def _damaged(num_files: int) -> str:
    files = "file" if num_files == 1 else "files"
    return f" {num_files} {files} cannot be read." if num_files else ""


def choose_steps(steps: Sequence[int]) -> list[int]:
    """Return the newest steps, and earlier ones at even distances."""
    newest, earlier = steps[-NUM_NEWEST:], steps[:-NUM_NEWEST]
    return [*_evenly(earlier, MAX_STEPS - NUM_NEWEST), *newest]


def choose_groups(rows: Sequence[dict[str, Any]], num_rows: int) -> list[dict[str, Any]]:
    """Return whole groups at even distances, about this many rows together."""
    groups = [list(group) for _, group in groupby(rows, key=itemgetter(GROUP))]
    if not groups:
        return []
    num_groups = max(1, num_rows // max(map(len, groups)))
    return [row for group in _evenly(groups, num_groups) for row in group]


def shorten(text: str, limit: int) -> str:
    """Return the start and the end of a long text, where the final answer is."""
    if len(text) <= limit:
        return text
    start = limit // 3
    left_out = len(text) - limit
    return f"{text[:start]}\n[… {left_out:,} characters left out …]\n{text[start + left_out :]}"


def _evenly(items: Sequence[Any], number: int) -> list[Any]:
    """Return at most this many of the items, the first and the last among them."""
    if len(items) <= number:
        return list(items)
    distance = (len(items) - 1) / max(1, number - 1)
    return [items[round(one * distance)] for one in range(number)]


def _files(run: Run) -> dict[int, list[Path]]:
    """Return step -> its files, one for each rank, within the steps of the run.

    A run that ended in its first step may have its completions, but no row of metrics.
    """
    num_steps = max(1, run.num_steps)
    return {step: files for step, files in files_by_step(run.path).items() if step < num_steps}


def _read(paths: Sequence[Path]) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of all ranks, and the number of files that cannot be read.

    A file numbers its groups, which may have the same prompt.
    """
    rows: list[dict[str, Any]] = []
    num_damaged = 0
    for path in paths:
        try:
            names = pq.read_schema(path).names
            shown = [one for one in names if one in READ or one.startswith(OF_REWARDS)]
            for row in pq.read_table(path, columns=shown).to_pylist():
                number = row.get(GROUP, row.get("prompt_id"))  # earlier versions had none
                rows.append(row | {GROUP: (path.name, number)})
        except (OSError, pa.ArrowException):
            num_damaged += 1
    return rows, num_damaged


def _add(sample: Sample, rows: Sequence[dict[str, Any]], **place: Any) -> None:
    """Append the rows of a step in the form that the page's script reads."""
    for row in rows:
        prompt = shorten(row.get("prompt") or "", MAX_CHARACTERS)
        if not sample.prompts or sample.prompts[-1] != prompt:
            sample.prompts.append(prompt)
        rewards = [name.removeprefix("score/") for name in row if name.startswith("score/")]
        sample.rewards += [name for name in rewards if name not in sample.rewards]
        sample.rows.append(
            place
            | {name: row.get(name) for name in COLUMNS}
            | {
                "prompt": len(sample.prompts) - 1,
                "completion": shorten(row.get("completion") or "", MAX_CHARACTERS),
                "reward": _rounded(row.get("reward")),
                "advantage": _rounded(row.get("advantage")),
                "scores": {name: _rounded(row[f"score/{name}"]) for name in rewards},
                "details": {name: text for name in rewards if (text := _detail(row, name))},
            }
        )


def _detail(row: dict[str, Any], name: str) -> str:
    """Return the outcome of a score that has no value, and its explanation."""
    outcome, detail = row.get(f"outcome/{name}"), row.get(f"detail/{name}") or ""
    failed = "" if outcome in (None, Outcome.OK, Outcome.OTHER_SOURCE) else f"{outcome} "
    return f"{failed}{shorten(detail, MAX_DETAIL)}".strip()


def _rounded(value: float | None) -> float | None:
    """Return a number that JSON can hold."""
    return float(f"{value:.4g}") if value is not None and abs(value) < float("inf") else None
