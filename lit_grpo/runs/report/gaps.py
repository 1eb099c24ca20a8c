"""Find what a run has lost: rows of ``metrics.csv``, and files of completions.

Sums over the remaining rows do not cover the whole run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from lit_grpo.runs.files.completions import damaged_files, files_by_step
from lit_grpo.runs.files.config import argument, read_config
from lit_grpo.runs.files.event_log import read_events


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """Data that a run has lost; in a live run, with files half written, only rows in between."""

    num_finished_steps: int
    """The finished steps by all files of the run, as far as they were asked for."""
    lost_steps: Sequence[int]
    """The finished steps, from 1, without a row of metrics. None of them is known of a run whose
    configs do not say that every batch is logged."""
    lacks_time: bool
    """Whether ``seconds`` of the last row does not count all lost steps."""
    cut_lines: Sequence[int]
    """Lines of ``metrics.csv``, from 1, that are cut off, and left out."""
    damaged: Sequence[Path]
    """Files of completions that cannot be read."""

    @property
    def notes(self) -> list[str]:
        """A sentence for everything that is lost."""
        notes = []
        if lost := self.lost_steps:
            time = "" if self.lacks_time else "the time, and for "
            notes.append(
                f"metrics.csv has no rows for {len(lost)} of the {self.num_finished_steps} steps "
                f"({_spans(lost)}). Curves and totals omit these steps, except for {time}the "
                "tokens if completions/ has every step."
            )
        if cut := self.cut_lines:
            line, verb = ("line", "is") if len(cut) == 1 else ("lines", "are")
            notes.append(f"{line} {_spans(cut)} of metrics.csv {verb} cut off, and left out.")
        if damaged := self.damaged:
            more = f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""
            notes.append(f"{damaged[0]}{more} cannot be read, and its completions are left out.")
        return notes


def find_gaps(
    run_dir: Path,
    resumes: Mapping[int, float],
    cut_lines: Sequence[int],
    *,
    is_live: bool,
    read_up_to: int | None,
) -> Gaps:
    """Find what a run has lost.

    Args:
        resumes: Step, from 1, -> how often the run had been resumed, for each row of metrics.
        cut_lines: Lines of ``metrics.csv`` that are cut off.
        is_live: Whether a process trains in the directory.
        read_up_to: Look no further than this step; None looks at all of them.
    """
    found = max([0, *resumes, *([] if is_live else _recorded(run_dir))])
    num_finished = found if read_up_to is None else min(found, read_up_to)
    lost = [step for step in range(1, num_finished + 1) if step not in resumes]
    if lost and not _logs_every_batch(run_dir):
        lost = []
    return Gaps(
        num_finished_steps=num_finished,
        lost_steps=lost,
        lacks_time=bool(lost) and _lacks_time(resumes, num_finished),
        cut_lines=[] if is_live else cut_lines,
        damaged=[] if is_live else damaged_files(run_dir),
    )


def _recorded(run_dir: Path) -> Iterator[int]:
    """Yield steps that were finished; the last one with completions may not be."""
    yield from files_by_step(run_dir)
    yield from (one.step for one in read_events(run_dir)[-1:] if one.kind in ("done", "stop"))


def _logs_every_batch(run_dir: Path) -> bool:
    """Return whether every batch had a row of metrics, by all configs that the run has had."""
    configs = [read_config(path) for path in run_dir.glob("config.*yaml")]
    keys = ("log_every_n_steps", "accumulate_grad_batches")
    return bool(configs) and all(
        argument(config, "trainer", key) == 1 for config in configs for key in keys
    )


def _lacks_time(resumes: Mapping[int, float], num_finished_steps: int) -> bool:
    """Return whether the clock of the last row does not count all lost steps.

    It counts lost steps before the row, but none before a resumption, whose clock continues from
    the row that it has found.
    """
    rows = [(0, 0.0), *resumes.items()]
    return rows[-1][0] < num_finished_steps or any(
        step - before > 1 and number != earlier
        for (before, earlier), (step, number) in pairwise(rows)
    )


def _spans(numbers: Collection[int]) -> str:
    """Return ``3 to 8, 10`` of ascending numbers."""
    known = set(numbers)
    starts = [one for one in numbers if one - 1 not in known]
    ends = [one for one in numbers if one + 1 not in known]
    spans = zip(starts, ends, strict=True)
    return ", ".join(f"{start}" if start == end else f"{start} to {end}" for start, end in spans)
