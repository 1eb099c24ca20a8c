"""Run ``lit-grpo wandb-sync``: send what a run has logged offline to wandb."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from lit_grpo.cli.errors import print_error
from lit_grpo.cli.file_options import parse_run
from lit_grpo.runs.files.config import argument, read_config, similar_run
from lit_grpo.runs.wandb_teardown import DEFAULT_SAVE_DIR
from lit_grpo.stopping import ExitCode
from lit_grpo.types import UserError


def sync_wandb(arguments: Sequence[str]) -> int:
    """Run ``wandb sync`` on what is left of a run, and return the exit code: 1 if that fails.

    Raises:
        UserError: there is nothing to send, or wandb is not installed.
    """
    given = parse_run("wandb-sync", arguments)
    directories = [path / "wandb" for path in _save_dirs(Path(given.run_dir))]
    where = " and ".join(map(str, directories))
    if find_spec("wandb") is None:
        raise UserError("wandb is not installed. Install lit-grpo[wandb].")
    if not (run_dir := Path(given.run_dir)).is_dir():
        raise UserError(f"{run_dir}: no such run directory.{similar_run(run_dir)}")
    left = _unsent(directories, includes_online=given.include_online)
    if not left:
        online = "" if given.include_online else " What was logged online needs --include_online."
        raise UserError(
            f"{where} has nothing to send: no offline-run-* that was not sent before.{online} If "
            "wandb wrote elsewhere, send from there with `wandb sync DIR`."
        )
    print(
        f"sending {len(left)} wandb runs of {given.run_dir}; wandb retries silently while its "
        "server does not answer (Ctrl-C ends that, nothing is lost)",
        flush=True,
    )
    flags = ["--include-online"] if given.include_online else []
    done = subprocess.run([sys.executable, "-m", "wandb", "sync", *flags, *map(str, left)])
    unsent = _unsent(directories, includes_online=given.include_online)
    if done.returncode or unsent:  # without a login wandb exits with 0
        return print_error(
            f"wandb has sent {len(left) - len(unsent)} of {len(left)} runs in {where}; it says "
            "above why. If it needs a login: wandb login, or set WANDB_API_KEY. Then repeat this.",
            ExitCode.CRASHED,
        )
    return ExitCode.DONE


def _save_dirs(run_dir: Path) -> list[Path]:
    """Return the directories to which a run's loggers of wandb write, by its config."""
    loggers = argument(read_config(run_dir / "config.yaml"), "trainer", "logger")
    found = []
    for logger in loggers if isinstance(loggers, list) else [loggers]:
        if isinstance(logger, Mapping) and str(logger.get("class_path")).endswith("WandbLogger"):
            given = argument(logger, "save_dir") or argument(logger, "dir") or DEFAULT_SAVE_DIR
            path = str(run_dir) if given == DEFAULT_SAVE_DIR else str(given)
            found.append(Path(path.replace("${run_dir}", str(run_dir))))
    return list(dict.fromkeys([run_dir, *found]))


def _unsent(directories: Sequence[Path], *, includes_online: bool) -> list[Path]:
    """Return the wandb runs not marked as sent, the oldest first."""
    names = ("offline-run-*", "run-*") if includes_online else ("offline-run-*",)
    found = (path for one in directories for name in names for path in one.glob(name))
    return sorted(path for path in found if not _is_sent(path.glob("*.wandb")))


def _is_sent(logs: Iterable[Path]) -> bool:
    return all(log.with_name(f"{log.name}.synced").exists() for log in logs)
