"""Find what a run has lost: rows of ``metrics.csv``, and files of completions.

Sums over the rows that are left are not those of the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lit_grpo.runs.files.completions import damaged_files, files_by_step
from lit_grpo.runs.files.event_log import read_events
from lit_grpo.runs.files.lock import is_locked
from lit_grpo.runs.report.history import Run, argument, read_config, split_rows


def lost_steps(run: Run) -> list[int]:
    """Return the finished steps, from 1, that have no row of metrics.

    None of them is known of a run whose config does not say that every step is logged.
    """
    logged = {int(step) for step in run.metrics["step"]}
    lost = [step + 1 for step in range(num_steps_taken(run)) if step not in logged]
    if lost and argument(read_config(run.path), "trainer", "log_every_n_steps") != 1:
        return []
    return lost


def num_steps_taken(run: Run) -> int:
    """Return the finished steps by all files of a run, as far as they were asked for.

    The last step with completions may not be finished, and neither are those of a live run.
    """
    found = [run.num_steps, *([] if is_locked(run.path) else _recorded(run))]
    return max(found) if run.max_steps is None else min(max(found), run.max_steps)


def _recorded(run: Run) -> Iterator[int]:
    yield from files_by_step(run.path)
    yield from (one.step for one in read_events(run.path)[-1:] if one.kind in ("done", "stop"))


def gap_notes(runs: Sequence[Run]) -> list[str]:
    """Return a sentence for everything that runs have lost."""
    return [f"{run.label}: {note}" for run in runs for note in _notes(run)]


def _notes(run: Run) -> Iterator[str]:
    if lost := lost_steps(run):
        yield (
            f"metrics.csv has no rows for {len(lost)} of the {num_steps_taken(run)} steps "
            f"({_spans(lost)}). Its time and its curves lack them, and so do all numbers but the "
            "tokens, which are counted in completions/ if that has every step."
        )
    if is_locked(run.path):  # its files may be half written
        return
    file = run.path / "metrics.csv"
    if cut := split_rows(file.read_text())[1] if file.exists() else []:
        lines = f"line {cut[0]}" if len(cut) == 1 else f"lines {_spans(cut)}"
        yield f"{lines} of metrics.csv {'is' if len(cut) == 1 else 'are'} cut off, and left out."
    if damaged := damaged_files(run.path):
        more = f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""
        yield f"{damaged[0]}{more} cannot be read, and its completions are left out."


def _spans(numbers: Sequence[int]) -> str:
    """Return ``3 to 8, 10`` of ascending numbers."""
    starts = [one for one in numbers if one - 1 not in numbers]
    ends = [one for one in numbers if one + 1 not in numbers]
    spans = zip(starts, ends, strict=True)
    return ", ".join(f"{start}" if start == end else f"{start} to {end}" for start, end in spans)
