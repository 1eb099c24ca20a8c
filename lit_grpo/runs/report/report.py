"""The command ``lit-grpo report``: draw runs into a page and a picture, and print a summary.

Runs that started from each other are drawn as one training, other runs are compared.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.table import Table

from lit_grpo.runs.files.lock import is_locked
from lit_grpo.runs.report.comparison import describe, draw_comparison, free_path_of_comparison
from lit_grpo.runs.report.curves import draw_curves
from lit_grpo.runs.report.held_out import accuracies_compare, held_out_notes
from lit_grpo.runs.report.history import ACCURACY, Run, are_stages, load_runs
from lit_grpo.runs.report.page.diagnosis import Diagnosis, diagnose
from lit_grpo.runs.report.page.page import write_page
from lit_grpo.runs.report.summary import (
    HEADINGS,
    gap_notes,
    running_time,
    summary_row,
    token_notes,
)
from lit_grpo.runs.tables import add_numbers, make_table, open_console
from lit_grpo.types import UserError, check_range
from lit_grpo.types.errors import is_disk_full

NO_STEPS = {"Config": "config.yaml", "Log": "run.log"}
"""Files of a run that are named if it has no step to show."""


def report(run_dirs: Sequence[str | Path], *, read_up_to: int | None = None) -> None:
    """Draw runs, print a summary, and say where the files are.

    Args:
        read_up_to: The last step to read of each run; None reads all of them.

    Raises:
        UserError: a directory is not a run or cannot be written.
    """
    check_range("--steps", read_up_to, at_least=1)
    runs = load_runs(run_dirs, read_up_to)
    _report(runs, _page_path(runs), read_up_to)


def follow(
    run_dirs: Sequence[str | Path], every_seconds: float, *, read_up_to: int | None = None
) -> None:
    """Write the page of live runs again and again, and report when they have ended or at Ctrl-C.

    Args:
        read_up_to: As in `report`.

    Raises:
        UserError: as in `report`.
    """
    check_range("--every", every_seconds, above=0)
    check_range("--steps", read_up_to, at_least=1)
    page: Path | None = None
    try:
        while any(is_locked(Path(run_dir)) for run_dir in run_dirs):
            if runs := _load_live(run_dirs, read_up_to):
                is_first, page = page is None, page or _page_path(runs)
                with _writing(page):
                    write_page(runs, page, read_up_to=read_up_to, reload_seconds=every_seconds)
                if is_first:
                    print(f"{page} is written every {every_seconds:g} s. End with Ctrl-C.")
            time.sleep(every_seconds)
    except KeyboardInterrupt:
        if page is None:
            return
    runs = load_runs(run_dirs, read_up_to)
    _report(runs, page or _page_path(runs), read_up_to)


def _load_live(run_dirs: Sequence[str | Path], read_up_to: int | None) -> list[Run]:
    """Return the runs, or none as long as a directory has nothing of a run yet."""
    try:
        return load_runs(run_dirs, read_up_to)
    except UserError:
        return []


def _page_path(runs: Sequence[Run]) -> Path:
    return runs[-1].path / "report.html" if are_stages(runs) else free_path_of_comparison(runs)


def _report(runs: Sequence[Run], page: Path, read_up_to: int | None) -> None:
    with _writing(page):
        if are_stages(runs):
            draw_curves(runs, runs[-1].path / "curves.png")
        else:
            draw_comparison(runs, page.with_suffix(".png"))
        write_page(runs, page, read_up_to=read_up_to)
    console = open_console()
    if are_stages(runs):
        accuracy, paths = _accuracy_line(runs), _file_paths(runs[-1])
        lines = [accuracy] if accuracy else []
    else:
        paths = {"Comparison": page.with_suffix(".png"), "Page": page}
        lines = [describe(run) for run in runs if run.started_from is not None]
    console.print(_table(runs))
    diagnoses = [diagnose(run) for run in runs]
    lines += [_ending(run, found) for run, found in zip(runs, diagnoses, strict=True)]
    lines += [*gap_notes(runs), *held_out_notes(runs), *token_notes(runs)]
    failures = [line for found in diagnoses for line in found.failures]
    for line in [*lines, *failures, *(f"{name:<13}{path}" for name, path in paths.items())]:
        console.print(line, soft_wrap=True)


def _ending(run: Run, found: Diagnosis) -> str:
    """Return how a run ended, the first line of it, or that it still trains.

    Without a finished step there are no numbers: the whole message is shown, and alerts.
    """
    if run.num_steps:
        said, _, more = found.end.partition("\n")
        state = "" if said.startswith(found.state) else f"({found.state}) "
        return f"{run.label} {state}{said.strip()}{' …' if more else ''}"
    alerts = [f"Alert ({cause.name}): {cause.message}" for cause in found.causes]
    return " ".join(f"{run.label} ({found.state}) {' '.join([found.end, *alerts])}".split())


@contextmanager
def _writing(page: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            raise UserError(
                f"{page} cannot be written: the disk is full; an earlier page is kept. Free some "
                "space, and run the same command again."
            ) from error
        raise UserError(
            f"a report is written into its run, and {page} cannot be written: {error.strerror}. "
            "Copy the run to a place where you may write, without its checkpoints."
        ) from error


def _accuracy_line(runs: Sequence[Run]) -> str:
    """Return ``Held-out accuracy 0.527 after sft/0 → 0.984 after grpo/0 (2 min 9 s)``.

    If a run continued after its last validation, the step of that validation is given. Accuracies
    that cannot be compared have a comma instead of the arrow.
    """
    measured = [run for run in runs if run.has(ACCURACY)]
    stages = [_accuracy_after(run) for run in measured]
    do_compare = accuracies_compare(measured)
    if len(runs) == 1 and do_compare:
        several = [run for run in measured if len(run.values(ACCURACY)) > 1]
        stages[:0] = [f"{run.ends(ACCURACY)[0]:.3f}" for run in several]
    joined = (" → " if do_compare else ", ").join(stages)
    return f"Held-out accuracy {joined} ({running_time(runs)})" if stages else ""


def _accuracy_after(run: Run) -> str:
    """Return ``0.984 after grpo/0``, or when it was measured if training continued after it."""
    when = run.when(ACCURACY)
    return f"{run.ends(ACCURACY)[1]:.3f} {f'{when} of' if when else 'after'} {run.label}"


def _table(runs: Sequence[Run]) -> Table:
    name, *numbers = HEADINGS
    table = make_table(name)
    add_numbers(table, *numbers)
    for run in runs:
        table.add_row(*summary_row(run))
    return table


def _file_paths(run: Run) -> dict[str, Path]:
    names = {
        "Run": ".",
        "Page": "report.html",
        "Curves": "curves.png",
        "Completions": "completions",
        "Checkpoints": "checkpoints",
        "Final model": "final",
    } | (NO_STEPS if run.num_steps == 0 else {})
    return {name: run.path / part for name, part in names.items() if (run.path / part).exists()}
