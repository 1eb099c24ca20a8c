"""Find the checkpoint to resume from, or to evaluate."""

from __future__ import annotations

import logging
import shlex
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_only

from lit_grpo.distributed.checkpoints import is_complete
from lit_grpo.distributed.ranks import get_rank
from lit_grpo.runs.checkpoints.atomic_save import clean_up_killed_saves
from lit_grpo.runs.checkpoints.files import (
    BEST_FILE,
    last_checkpoint,
    newest_checkpoints,
    newest_first,
    read_manifest,
    read_state,
    why_unusable,
)
from lit_grpo.runs.files.config import is_run, similar_run
from lit_grpo.runs.files.event_log import Event, append_event, now, read_events
from lit_grpo.runs.files.log import close_run_log, open_run_log
from lit_grpo.types import UserError
from lit_grpo.types.atomic import earlier_path
from lit_grpo.types.paths import refuse_unreadable
from lit_grpo.types.settings import list_some

log = logging.getLogger(__name__)

AUTO = "auto"
"""The checkpoint path that resumes a run where there is something to resume from."""
BEST = "best"
"""The checkpoint path that means the best one by the metric that a callback monitors."""


def find_checkpoint(name: str, run_dir: Path, *, is_evaluated: bool = False) -> str | None:
    """Return the path of a checkpoint; ``last`` is the newest intact one of the run.

    ``best`` is that by the ``monitor`` of `Checkpoints`, or else of Lightning's `ModelCheckpoint`.
    ``auto`` is the same as ``last``, and None if the run has no checkpoint yet. A run whose
    checkpoints are all damaged is also refused: to start it again would overwrite what it has.

    Args:
        is_evaluated: Whether it will be evaluated; then ``auto`` also needs a checkpoint.

    Raises:
        UserError: there is none, or it cannot be used.
    """
    if not name:
        raise UserError(
            "ckpt_path must be a file, last, best or auto, got an empty text (a variable of the "
            "shell that is not set?). Set ckpt_path, or leave it out for a new run."
        )
    is_own = name in ("last", AUTO)
    refuse_unreadable(run_dir / "checkpoints" if is_own or name == BEST else Path(name))
    if is_own or name == BEST:
        clean_up_killed_saves(run_dir / "checkpoints")
    elif earlier_path(Path(name)).exists():
        clean_up_killed_saves(Path(name).parent)
    if is_own and is_evaluated and not _named_checkpoints(run_dir):
        raise UserError(
            f"{run_dir} has no checkpoint to evaluate. Set run_dir to that of a run, or leave "
            "ckpt_path out to evaluate the model without a checkpoint."
        )
    if name == AUTO and not _named_checkpoints(run_dir):
        _refuse_ended(run_dir)
        rank_zero_only(log.info)("%s has no checkpoint yet: starting at its first step", run_dir)
        return None
    if is_own:
        return str(_newest_intact(run_dir))
    return _checked(str(_best(run_dir)) if name == BEST else name)


def _checked(name: str) -> str:
    """Return a path after checking that it leads to an intact checkpoint."""
    if "://" not in name and not Path(name).exists():
        there = [one.name for one in newest_first(Path(name).parent, "*.ckpt")]
        listed = f" In {Path(name).parent} are {list_some(there, 5)}." if there else ""
        raise UserError(
            f"{name}: no such checkpoint.{listed} Set ckpt_path to a file, to last, best or auto."
        )
    if Path(name).exists() and not is_checkpoint(Path(name)):
        what = "a directory" if Path(name).is_dir() else "no checkpoint"
        raise UserError(
            f"{name} is {what}: ckpt_path must be a checkpoint, such as "
            "runs/my/0/checkpoints/last.ckpt. To go on with a run use lit-grpo fit runs/my/0, or "
            "in Python ckpt_path='last'; to start from a model set model.policy.path; for data set "
            "data.train."
        )
    if Path(name).exists() and (why := why_unusable(Path(name), reads_all=True)):
        raise UserError(
            f"{name} is damaged: {why}. Set ckpt_path to last, the newest intact checkpoint of a "
            "run."
        )
    return name


def _best(run_dir: Path) -> Path:
    """Return ``best.ckpt`` of a run, or what a `ModelCheckpoint` with a monitor calls the best.

    The callback keeps an absolute path: of a run that was moved, or of a copy, the file of the same
    name in ``checkpoints/`` is meant.

    Raises:
        UserError: it has neither.
    """
    if (own := run_dir / "checkpoints" / BEST_FILE).exists():
        return own
    newest = last_checkpoint(run_dir)
    states = {} if newest is None else read_state(newest).get("callbacks", {})
    paths = {
        _where_it_is_now(Path(state["best_model_path"]), run_dir)
        for key, state in states.items()
        if key.startswith("ModelCheckpoint") and state["monitor"] and state["best_model_path"]
    }
    found = [path for path in paths if path.exists()]
    if len(found) != 1:
        what = "no best checkpoint" if not found else f"{len(found)} best checkpoints"
        raise UserError(
            f"{run_dir} has {what}. One is written after a validation if trainer.callbacks has "
            "Checkpoints with a monitor, such as val/accuracy. Set ckpt_path to last, or to one of "
            f"those that lit-grpo checkpoints {shlex.quote(str(run_dir))} lists."
        )
    return found[0]


def _where_it_is_now(path: Path, run_dir: Path) -> Path:
    """Return the file of that name in ``checkpoints/`` of a run that was moved or copied.

    A path that exists and was not in ``checkpoints/`` of a run stays.
    """
    is_of_run = path.parent.name == "checkpoints"
    own = run_dir / "checkpoints" / path.name
    return own if own.exists() and (is_of_run or not path.exists()) else path


def _refuse_ended(run_dir: Path) -> None:
    """Check that a run without a checkpoint was killed before its first one.

    Raises:
        UserError: it has ended, so a new start would overwrite what it has trained.
    """
    ends = [one for one in read_events(run_dir) if one.kind in ("stop", "done") and one.step]
    if ends or (run_dir / "final").exists():
        step = f" after step {ends[-1].step}" if ends else ""
        raise UserError(
            f"{run_dir} has a run that ended{step}, and no checkpoint to go on from: starting "
            f"again would overwrite it. Put its checkpoints back, move {run_dir} away, or set "
            "another run_dir."
        )


def is_checkpoint(path: Path) -> bool:
    """Return whether the path is a checkpoint, intact or damaged."""
    if path.is_dir():
        return is_complete(path)
    if path.suffix == ".ckpt":
        return True
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/data.pkl") for name in archive.namelist())
    with path.open("rb") as file:
        return file.read(2) == b"PK"


def _named_checkpoints(run_dir: Path) -> list[Path]:
    """Return all checkpoints of a run, a link included that has lost its file."""
    return sorted(Path(run_dir, "checkpoints").glob("*.ckpt"))


def _newest_intact(run_dir: Path) -> Path:
    found: dict[str, str] = {}
    for checkpoint in newest_checkpoints(run_dir):
        name = checkpoint.resolve().name
        if name in found:  # by a link
            continue
        why = why_unusable(checkpoint, reads_all=True)
        if not why:
            if found:
                _report_damage(run_dir, found, checkpoint)
            return checkpoint
        found[name] = why
    lost = [one for one in _named_checkpoints(run_dir) if not one.exists()]
    found |= {one.name: "the file that it names is gone" for one in lost}
    if not found and not is_run(run_dir):
        raise UserError(
            f"{run_dir} holds no run to go on with (a relative run_dir counts from {Path.cwd()})."
            f"{similar_run(run_dir)} Set run_dir to that of the run, or ckpt_path to auto to start "
            "one there."
        )
    if not found:
        raise UserError(
            f"{run_dir} has no checkpoint to go on from. Set ckpt_path to auto to start it again "
            "in its directory, or to a checkpoint of a different run."
        )
    listed = "; ".join(f"{name}: {why}" for name, why in found.items())
    raise UserError(
        f"{run_dir} has no intact checkpoint to go on from, and starting again would overwrite the "
        f"run. Damaged in its checkpoints/ ({listed}). Put an intact copy of one of them back, or "
        f"name another checkpoint in ckpt_path; to start again move {run_dir} away, or set another "
        "run_dir."
    )


def _report_damage(run_dir: Path, damaged: Mapping[str, str], used: Path) -> None:
    """Log which checkpoints are damaged, in ``run.log``, too, and record it among the events."""
    run_log = None
    with suppress(UserError):  # the run may be only read, for an evaluation
        run_log = open_run_log(run_dir, get_rank())
    for name, why in damaged.items():
        log.warning("%s is damaged and passed over: %s", used.parent / name, why)
    if run_log is not None:
        close_run_log(run_log)
    if get_rank() == 0:
        _record_damage(run_dir, damaged, used)


def _record_damage(run_dir: Path, damaged: Mapping[str, str], used: Path) -> None:
    listed = "; ".join(f"{name} is damaged: {why}" for name, why in damaged.items())
    manifest = read_manifest(used)
    event = Event(
        time=now(),
        step=(manifest and manifest.rollout_step) or 0,
        kind="warning",
        message=f"{listed}. The run goes on from {used.resolve().name}.",
        cause="checkpoint_damaged",
    )
    with suppress(OSError):
        append_event(run_dir, event)
