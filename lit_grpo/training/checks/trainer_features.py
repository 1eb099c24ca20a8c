"""Refuse what Lightning's trainer can do for other modules, and say what takes its place here."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
)

from lit_grpo.types import UserError, setting_error

MICRO_BATCHES = "Micro-batches: model.update.max_tokens_per_micro_batch."
FINDERS: dict[type[Callback], str] = {
    LearningRateFinder: "Set the learning rate in the optimizer, and compare short runs.",
    BatchSizeFinder: "lit-grpo plan and doctor say what fits into memory; set "
    "data.prompts_per_step and model.update.max_tokens_per_micro_batch.",
}
"""Callback that changes settings of a module by trial steps -> what to do instead."""


def refuse_automatic(trainer: L.Trainer, model: L.LightningModule) -> None:
    """Refuse settings and callbacks of Lightning for which lit-grpo has keys of its own.

    Raises:
        UserError: one is set.
    """
    for one in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, instead in FINDERS.items():
            if isinstance(one, kind):
                raise UserError(
                    f"{kind.__name__} is not supported (its trial steps would count as "
                    f"steps of the run). {instead}"
                )
    if not model.automatic_optimization:
        _refuse_for_grpo(trainer)


def _refuse_for_grpo(trainer: L.Trainer) -> None:
    why = "GRPO takes its optimizer steps itself"
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    if any(isinstance(one, GradientAccumulationScheduler) for one in callbacks):
        raise UserError(f"GradientAccumulationScheduler is not supported ({why}). {MICRO_BATCHES}")
    if trainer.accumulate_grad_batches != 1:
        key, value = "trainer.accumulate_grad_batches", trainer.accumulate_grad_batches
        raise UserError(f"{setting_error(key, '1', value, why)} {MICRO_BATCHES}")
    if trainer.gradient_clip_val:
        key, clip = "trainer.gradient_clip_val", trainer.gradient_clip_val
        raise UserError(
            f"{setting_error(key, 'null', clip, why)} Clipping: model.update.max_grad_norm."
        )
