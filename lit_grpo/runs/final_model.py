"""The directory ``final/`` of a run: the trained policy as a Hugging Face model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from lit_grpo.policy import Policy
from lit_grpo.runs.files.prompt_format import PROMPT_FORMAT, format_of, write_prompt_format
from lit_grpo.runs.files.space import warn_of_space
from lit_grpo.stopping import get_stop_reason
from lit_grpo.types.atomic import numbered_path, replacing
from lit_grpo.types.paths import shown_path

log = logging.getLogger(__name__)


class FinalModel(Callback):
    """Write the trained policy to ``final/`` as a Hugging Face model when training is done.

    A run that was stopped writes none because it can be resumed. The directory is moved into place
    when it is complete; if a killed process has not written it, the next start of the run does. It
    includes a model card, ``README.md``, and how its prompts were formatted. If a finished run is
    extended, its model is kept as ``final.0``, ``final.1`` and so on.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir) / "final"

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero and self.path.exists() and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            kept = numbered_path(self.path)
            self.path.rename(kept)
            log.info(
                "the final model of the earlier part of the run is kept as %s", shown_path(kept)
            )

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save how the prompts are formatted, for a model that is exported from the checkpoint."""
        checkpoint[PROMPT_FORMAT] = format_of(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if get_stop_reason(trainer) is None:
            self._write(trainer, pl_module)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        is_missing = trainer.strategy.broadcast(not self.path.exists())
        if is_missing and get_stop_reason(trainer) is None:  # there was nothing left to train
            self._write(trainer, pl_module)

    def _write(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the directory on rank 0; the others take part in gathering a sharded policy."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        policy: Any = pl_module.policy
        with self._folder(trainer, policy) as folder:
            policy.save_pretrained(folder, is_writer=trainer.is_global_zero)
            if trainer.is_global_zero:
                from lit_grpo.runs.report.model_card import write_model_card  # imports pandas

                write_prompt_format(folder, format_of(trainer))
                write_model_card(folder, self.path.parent, trainer, pl_module)
        trainer.strategy.barrier("FinalModel")

    @contextmanager
    def _folder(self, trainer: L.Trainer, policy: Policy) -> Iterator[Path]:
        if not trainer.is_global_zero:
            yield self.path
            return
        log.info("writing the final model to %s", shown_path(self.path))
        num_bytes, memory_bytes = policy.saved_bytes()
        warn_of_space(self.path, num_bytes=num_bytes, memory_bytes=memory_bytes)
        with replacing(self.path) as folder:
            yield folder
