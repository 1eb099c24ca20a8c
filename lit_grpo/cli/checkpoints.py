"""The command ``lit-grpo checkpoints``: list those of a run, verify them, or go back to one."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NoReturn

from lit_grpo.cli.commands import OPTIONS
from lit_grpo.runs.checkpoint_files import (
    LAST,
    Manifest,
    damage,
    link_last,
    newest_first,
    read_manifest,
)
from lit_grpo.runs.tables import add_numbers, make_table, open_console
from lit_grpo.stopping import ExitCode
from lit_grpo.types import UserError

SHOWN = {"reward/mean": "reward", "val/accuracy": "accuracy", "sft/loss": "loss"}
"""Metric -> its column."""


def manage_checkpoints(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code: 1 if a checkpoint is damaged.

    Raises:
        UserError: the arguments are wrong, or there is no such checkpoint.
    """
    given = _parser().parse_args(arguments)
    run_dir, console = Path(given.run_dir), open_console()
    found = _find(run_dir, given.before_step)
    why = {path: damage(path, reads_all=given.verify) for path in found}
    usable = next((path for path in found if not why[path]), None)
    if given.latest or given.recover:
        if usable is None:
            raise UserError(f"{run_dir} has no such checkpoint that is intact.")
        if given.recover:
            _recover(usable, run_dir, is_trial=given.dry_run)
        else:
            print(usable)
        return ExitCode.DONE
    table = make_table("checkpoint")
    metrics = _metrics(found)
    add_numbers(table, "step", "written", "size", *(SHOWN[name] for name in metrics))
    table.add_column("state")
    for path in found:
        table.add_row(path.name, *_row(path, metrics), why[path] or _state(path, given.verify))
    console.print(table)
    return ExitCode.CRASHED if any(why.values()) else ExitCode.DONE


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="lit-grpo checkpoints", add_help=False, allow_abbrev=False)
    parser.add_argument("run_dir")
    for name, settings in OPTIONS["checkpoints"].items():
        parser.add_argument(name, **settings)
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')}. See lit-grpo checkpoints --help.")


def _find(run_dir: Path, before_step: int | None) -> list[Path]:
    """Return the checkpoints of a run, the newest first, without links to them."""
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such run.")
    found = newest_first(run_dir / "checkpoints", "*.ckpt")
    found = [path for path in found if not (path.name == LAST and path.is_symlink())]
    if not found:
        raise UserError(f"{run_dir} has no checkpoint.")
    if before_step is None:
        return found
    early = [path for path in found if _step(path) is not None and _step(path) < before_step]  # type: ignore[operator]
    if not early:
        raise UserError(f"{run_dir} has no checkpoint from before step {before_step}.")
    return sorted(early, key=lambda path: _step(path) or 0, reverse=True)


def _step(path: Path) -> int | None:
    manifest = read_manifest(path)
    return None if manifest is None else manifest.rollout_step


def _metrics(found: Sequence[Path]) -> list[str]:
    """Return the metrics that any of the checkpoints has."""
    manifests = [manifest for path in found if (manifest := read_manifest(path))]
    return [name for name in SHOWN if any(name in (one.metrics or {}) for one in manifests)]


def _row(path: Path, metrics: Sequence[str]) -> list[str]:
    manifest, stat = read_manifest(path), path.stat()
    time = datetime.fromtimestamp(stat.st_mtime)
    if manifest is not None and manifest.time:
        time = datetime.fromisoformat(manifest.time)
    values = {} if manifest is None else manifest.metrics or {}
    step = "–" if manifest is None else str(manifest.rollout_step)
    numbers = [f"{values[name]:.3f}" if name in values else "–" for name in metrics]
    return [step, f"{time:%Y-%m-%d %H:%M:%S}", _size(stat.st_size), *numbers]


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            break
        size, unit = size / 1000, {"B": "kB", "kB": "MB", "MB": "GB", "GB": "TB"}[unit]
    return f"{size:.0f} {unit}" if size >= 100 or unit == "B" else f"{size:.1f} {unit}"


def _state(path: Path, is_verified: bool) -> str:
    """Return what is known of a checkpoint that looks intact."""
    manifest: Manifest | None = read_manifest(path)
    if manifest is None:
        return "no manifest: looks complete"
    intact = "verified" if is_verified else "complete"
    return f"{intact}, but {manifest.trouble}" if manifest.trouble else f"{intact}, healthy"


def _recover(checkpoint: Path, run_dir: Path, *, is_trial: bool) -> None:
    """Make a checkpoint the one that a resumed run goes on from; the others stay."""
    step = _step(checkpoint)
    at = "" if step is None else f" at rollout step {step}"
    if is_trial:
        print(f"{run_dir} would go on from {checkpoint}{at} when it is resumed")
        return
    os.utime(checkpoint)
    link_last(checkpoint)
    print(f"{run_dir} goes on from {checkpoint}{at} when it is resumed")
