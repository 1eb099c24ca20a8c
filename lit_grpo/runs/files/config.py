"""The file ``config.yaml`` of a run: the config that it was started with."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from lightning.pytorch.callbacks import Callback

from lit_grpo.types.atomic import numbered_path, replacing_file

MARKS = (
    *("config.yaml", "metrics.csv", "run.log", "events.jsonl", "run.lock"),
    *("completions", "checkpoints"),
)
"""Entries of a run directory; at least one exists before the first step is finished."""


class ConfigFile(Callback):
    """Write ``config.yaml`` when training begins, so that a refused resume leaves it as it was.

    A different one of an earlier part of the run is kept as ``config.0.yaml`` and so on.

    Args:
        run_dir: Directory of the run.
        config: The config, as YAML.
    """

    def __init__(self, run_dir: str | Path, config: str) -> None:
        self.path = Path(run_dir) / "config.yaml"
        self.config = config

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        if self.path.exists() and self.path.read_text() != self.config:
            shutil.copyfile(self.path, numbered_path(self.path))
        with replacing_file(self.path) as new:
            new.write_text(self.config)


def read_config(path: Path) -> Any:
    """Return the values of a config, or None: a run made in Python has none."""
    try:
        return yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return None


def argument(values: Any, *names: str) -> Any:
    """Return an argument of an argument (…) of a config, whether or not they are in ``init_args``.

    None if there is no such argument.
    """
    for name in names:
        if not isinstance(values, Mapping):
            return None
        values = (values.get("init_args") or values).get(name)
    return values


def is_run(path: Path) -> bool:
    """Return whether a directory is a run's."""
    return any((path / name).exists() for name in MARKS)


def run_of(checkpoint: str | Path) -> Path:
    """Return the directory of the run that wrote a checkpoint, ``RUN/checkpoints/last.ckpt``."""
    return Path(checkpoint).parent.parent


def is_of_another_run(checkpoint: str | Path, run_dir: Path) -> bool:
    """Return whether a checkpoint is in the directory of another run than this one's."""
    other = run_of(Path(checkpoint).absolute())
    return is_run(other) and other.resolve() != run_dir.resolve()


def similar_run(path: Path) -> str:
    """Return `` Did you mean X?`` for the run, or directory of runs, whose path is the closest."""
    parents = (path, *path.parents)
    num_missing = next((n for n, one in enumerate(parents) if one.is_dir()), 0)
    if not 1 <= num_missing <= 2:  # further up there may be a whole disk to look through
        return ""
    above = parents[num_missing]
    beside = above.glob("/".join(["[!.]*"] * num_missing))
    found = (one for one in beside if is_run(one) or any(map(is_run, one.glob("*"))))
    runs = [str(one.relative_to(above)) for one in found]
    close = get_close_matches(str(path.relative_to(above)), runs, n=1)
    return f" Did you mean {above / close[0]}?" if close else ""
