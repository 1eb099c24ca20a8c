"""Write ``config.yaml``, the config that a run was started with."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import Callback

from lit_grpo.types.atomic import numbered_path


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
        new = self.path.with_name(".config.yaml.partial")
        new.write_text(self.config)
        os.replace(new, self.path)
