"""Run ``lit-grpo checkpoints``: list, verify, restore or export the checkpoints of a run."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import chain
from pathlib import Path

from rich.table import Table

from lit_grpo.cli.file_options import parse_run
from lit_grpo.runs.checkpoints.atomic_save import find_leftovers, is_saving
from lit_grpo.runs.checkpoints.files import (
    LAST,
    SUMMARY,
    Manifest,
    choose,
    is_healthy,
    newest_first,
    read_manifest,
    size_of,
    why_unusable,
)
from lit_grpo.runs.files.config import similar_run
from lit_grpo.runs.files.lock import is_locked
from lit_grpo.runs.files.space import format_size
from lit_grpo.runs.tables import add_numbers, make_table, open_console
from lit_grpo.stopping import ExitCode
from lit_grpo.types import UserError
from lit_grpo.types.atomic import EARLIER
from lit_grpo.types.paths import refuse_unreadable
from lit_grpo.types.settings import list_some

Found = dict[Path, Manifest | None]
"""Checkpoint -> its manifest; None if it has none that can be read."""


def manage_checkpoints(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code: 1 if a checkpoint is damaged.

    Raises:
        UserError: the arguments are wrong, or there is no such checkpoint.
    """
    given = parse_run("checkpoints", arguments)
    run_dir = Path(given.run_dir)
    found = _find(run_dir, given.before_step)
    if not (given.latest or given.recover or given.export):
        why = {path: why_unusable(path, reads_all=given.verify) for path in found}
        console = open_console()
        console.print(_table(found, why, is_verified=given.verify))
        for line in _describe_leftovers(run_dir / "checkpoints"):
            console.print(line, soft_wrap=True)
        return ExitCode.CRASHED if any(why.values()) else ExitCode.DONE
    intact = (path for path in found if not why_unusable(path, reads_all=True))
    usable = next(intact, None)
    if usable is None:
        raise UserError(f"{run_dir} has no such checkpoint that is intact.")
    if given.latest:
        print(usable)
    if given.recover:
        chosen = next((one for one in chain([usable], intact) if is_healthy(found[one])), usable)
        _recover(chosen, found[chosen], run_dir, is_trial=given.dry_run)
        if not is_healthy(found[usable]):
            print(_why_chosen(chosen, usable, found[usable]))
    if given.export is not None:
        _export(usable, found[usable], given)
    return ExitCode.DONE


def _find(run_dir: Path, before_step: int | None) -> Found:
    """Return the checkpoints of a run, the newest first, without links to them."""
    refuse_unreadable(run_dir / "checkpoints")
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such run.{similar_run(run_dir)}")
    paths = newest_first(run_dir / "checkpoints", "*.ckpt")
    found = {
        path: read_manifest(path) for path in paths if not (path.name == LAST and path.is_symlink())
    }
    if not found:
        hints = _describe_leftovers(run_dir / "checkpoints")
        if inside := sorted(str(one.parent) for one in run_dir.glob("*/checkpoints")):
            hints.append(f"Did you mean {list_some(inside, 3)}?")
        raise UserError(" ".join([f"{run_dir} has no checkpoint.", *hints]))
    if before_step is None:
        return found
    steps = {path: one.rollout_step for path, one in found.items() if one is not None}
    early = {path: step for path, step in steps.items() if step is not None and step < before_step}
    if not early:
        raise UserError(f"{run_dir} has no checkpoint from before step {before_step}.")
    return {path: found[path] for path in sorted(early, key=early.__getitem__, reverse=True)}


def _describe_leftovers(directory: Path) -> list[str]:
    """Return lines about the files of unfinished saves; none if there are no such files."""
    left = find_leftovers(directory)
    if not left:
        return []
    size = format_size(sum(map(size_of, left)))
    listed = f"{', '.join(path.name for path in left)} ({size} together)"
    if is_saving(directory):
        return [f"A checkpoint is being written: {listed}."]
    lines = [f"Left by a save that was killed: {listed}. The next save or resume removes this."]
    replaced = [path.with_suffix("") for path in left if path.suffix == EARLIER]
    if missing := [path.name for path in replaced if not path.exists()]:
        lines.append(f"Until then {', '.join(missing)} is missing: it was being replaced.")
    return lines


def _table(found: Found, why: Mapping[Path, str], *, is_verified: bool) -> Table:
    """Return a row for each checkpoint, with its damage or what else is known of its state."""
    table = make_table("checkpoint")
    logged = set().union(*(one.metrics for one in found.values() if one is not None))
    metrics = [name for name in SUMMARY if name in logged]
    add_numbers(table, "step", "written", "size", *(SUMMARY[name] for name in metrics))
    table.add_column("state")
    for path, manifest in found.items():
        state = why[path] or _state(manifest, is_verified)
        table.add_row(path.name, *_numbers(path, manifest, metrics), state)
    return table


def _numbers(path: Path, manifest: Manifest | None, metrics: Sequence[str]) -> list[str]:
    time, values = datetime.fromtimestamp(path.stat().st_mtime), {}
    if manifest is not None:
        time = datetime.fromisoformat(manifest.time) if manifest.time else time
        values = dict(manifest.metrics)
    step = "–" if manifest is None else str(manifest.rollout_step)
    numbers = [f"{values[name]:.3f}" if name in values else "–" for name in metrics]
    return [step, f"{time:%Y-%m-%d %H:%M:%S}", format_size(size_of(path)), *numbers]


def _state(manifest: Manifest | None, is_verified: bool) -> str:
    """Describe a checkpoint that looks intact."""
    if manifest is None:
        return "no manifest: looks complete"
    intact = "verified" if is_verified else "complete"
    return f"{intact}, but {manifest.trouble}" if manifest.trouble else f"{intact}, healthy"


def _recover(checkpoint: Path, manifest: Manifest | None, run_dir: Path, *, is_trial: bool) -> None:
    """Make a checkpoint the one that a resumed run starts from; until then the others stay.

    Raises:
        UserError: the run is training, or its directory cannot be written.
    """
    at = _after(manifest)
    if is_trial:
        print(f"{run_dir} would go on from {checkpoint}{at} when it is resumed")
        return
    if is_locked(run_dir):
        raise UserError(
            f"{run_dir} must have ended before --recover, but a process trains in it (its next "
            "checkpoint would be the one to go on from). End it first: Ctrl-C, or SIGTERM to its "
            "process."
        )
    try:
        choose(checkpoint)
    except OSError as error:
        raise UserError(
            f"{run_dir} must be a directory that can be written ({error.strerror}), since the "
            "checkpoint to go on from is noted there. Make it writable, or copy the run."
        ) from None
    print(f"{run_dir} goes on from {checkpoint}{at} when it is resumed")


def _after(manifest: Manifest | None) -> str:
    """Return the step of a checkpoint as the end of its name; empty if it is not known."""
    step = None if manifest is None else manifest.rollout_step
    return "" if step is None else f" after rollout step {step}"


def _why_chosen(chosen: Path, newest: Path, manifest: Manifest | None) -> str:
    """Return why the newest intact checkpoint was passed over, or chosen though it is not healthy.

    Args:
        manifest: The newest one's.
    """
    why = "it has no manifest" if manifest is None else manifest.trouble
    if chosen == newest:
        return f"no intact checkpoint is known to be healthy: this is the newest ({why})"
    return f"{newest.name} is newer, but not known to be healthy ({why})"


def _export(checkpoint: Path, manifest: Manifest | None, given: Namespace) -> None:
    """Write a checkpoint as a Hugging Face model."""
    from lit_grpo.cli.export import check_directory, export  # loads transformers
    from lit_grpo.cli.run_dir import where_started

    run_dir, directory = Path(given.run_dir), Path(given.export)
    check_directory(directory)
    if given.dry_run:
        print(f"{directory} would get the model of {checkpoint}{_after(manifest)}")
        return
    try:
        export(checkpoint, run_dir, directory)
    except UserError as error:
        step = [] if given.before_step is None else ["--before_step", str(given.before_step)]
        words = [given.run_dir, *step, "--export", str(directory.absolute())]
        raise UserError(f"{error}{where_started('checkpoints', words, str(error))}") from error
    print(f"{directory} has the model of {checkpoint}{_after(manifest)}")
