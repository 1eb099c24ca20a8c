"""Resume an optimizer with the settings of the current config."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_only
from torch.optim import Optimizer

from lit_grpo.training.optimizer.fused_steps import place_counts
from lit_grpo.types.saved_state import saved_state

log = logging.getLogger(__name__)


def configured_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each group of parameters, before a checkpoint is loaded."""
    return [
        {name: value for name, value in group.items() if name not in ("params", "lr")}
        for group in optimizer.param_groups
    ]


def use_plain_numbers(optimizer: Optimizer) -> Optimizer:
    """Replace NumPy's numbers in the settings, as of ``np.linspace``, which no file would hold."""
    for group in optimizer.param_groups:
        parameters = group.pop("params")
        group.update(saved_state("model.optimizer", group), params=parameters)
    return optimizer


def by_key(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings of the first group that has each, by its key in a config."""
    return {
        f"model.optimizer.{'lr' if name == 'initial_lr' else name}": value
        for group in reversed(groups)
        for name, value in group.items()
    }


def apply_settings(
    trainer: L.Trainer,
    configured: Sequence[Mapping[str, Any]],
    earlier: Sequence[Mapping[str, Any]],
) -> None:
    """Use the configured learning rate, and other settings that differ from the run's so far.

    Values that an optimizer itself keeps among its settings, like Prodigy, are not changed.

    Args:
        configured: The settings of the current config, by group.
        earlier: The settings of the part of the run that wrote the checkpoint.
    """
    (optimizer,) = trainer.optimizers
    schedule: Any = trainer.lr_scheduler_configs[0].scheduler
    schedule.base_lrs = [settings["initial_lr"] for settings in configured]
    saved_rate = optimizer.param_groups[0]["lr"]
    for group, settings, before, factor in zip(
        optimizer.param_groups, configured, earlier, schedule.lr_lambdas, strict=True
    ):
        changed = {k: v for k, v in settings.items() if k not in before or before[k] != v}
        group.update(changed, lr=settings["initial_lr"] * factor(schedule.last_epoch))
    rate = optimizer.param_groups[0]["lr"]
    has_same_peak = configured[0]["initial_lr"] == earlier[0].get("initial_lr")
    is_same_optimizer = configured is not earlier  # else its state was dropped
    if is_same_optimizer and has_same_peak and not math.isclose(rate, saved_rate, rel_tol=1e-6):
        rank_zero_only(log.info)(
            "the learning rate goes on at %.3g, not %.3g: its schedule has changed, as by another "
            "max_steps",
            *(rate, saved_rate),
        )
    place_counts(optimizer)
