"""Roll a run back: take the policy and the optimizer of an earlier checkpoint, and train on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lit_grpo.distributed.optimizer_class import has_other_optimizer
from lit_grpo.runs.checkpoints.callback import Checkpoints
from lit_grpo.runs.checkpoints.files import (
    newest_first,
    read_manifest,
    read_state,
    why_unusable,
)
from lit_grpo.runs.checkpoints.writer import wait_until_written


def roll_back(
    trainer: L.Trainer,
    pl_module: L.LightningModule,
    before_step: int,
    *,
    passed_over: Sequence[Sequence[int]] = (),
    only_before: bool = False,
) -> Path | None:
    """Restore the policy and the optimizer from the newest healthy checkpoint; return its path.

    Everything else continues: the position in the data, the counts of steps, the schedule of the
    learning rate, the seeds, the budgets of the rewards. Every rank must call this. Return None,
    and change nothing, if there is no such checkpoint.

    Args:
        before_step: Finished rollout steps at which the weights are known to be bad. A checkpoint
            from before is preferred to one from this step.
        passed_over: First and last steps of checkpoints that are not used, from a part of the
            run that an earlier rollback has left.
        only_before: Whether a checkpoint from this step or later is not used at all.
    """
    wait_until_written(trainer)
    path: Path | None = trainer.strategy.broadcast(
        _choose(trainer, before_step, passed_over, only_before)
    )
    if path is None:
        return None
    settings = [_settings(optimizer) for optimizer in trainer.optimizers]
    checkpoint = trainer.strategy.load_checkpoint(path, weights_only=False)
    # Of this very run, so only frozen weights can be missing: they are read from elsewhere.
    trainer.strategy.load_model_state_dict(checkpoint, strict=False)
    trainer.strategy.load_optimizer_state_dict(checkpoint)
    _apply_settings(trainer, settings)
    pl_module.on_roll_back(checkpoint)  # type: ignore[operator]
    return path


def step_of(checkpoint: Path) -> int:
    """Return the finished rollout steps of a checkpoint that a rollback has chosen."""
    return int(checkpoint.stem.removeprefix("step_"))


@dataclass(slots=True)
class RollbackHistory:
    """The rollbacks of a run, in finished rollout steps, and the checkpoints to pass over."""

    rollbacks: list[tuple[int, int]] = field(default_factory=list)
    """The step at which each was made, and its checkpoint's step."""
    passed_over: list[tuple[int, int]] = field(default_factory=list)
    """First and last steps of the checkpoints that rollbacks have abandoned."""

    def last_without_effect(self, begin: int) -> tuple[int, int] | None:
        """Return the last rollback if trouble from this step on began before it, else None."""
        if self.rollbacks and begin <= self.rollbacks[-1][0]:
            return self.rollbacks[-1]
        return None

    def add(self, at: int, to: int) -> None:
        """Remember a rollback: the checkpoints between both steps are abandoned."""
        self.rollbacks.append((at, to))
        self.passed_over.append((to + 1, at - 1))


def _choose(
    trainer: L.Trainer,
    before_step: int,
    passed_over: Sequence[Sequence[int]],
    only_before: bool,
) -> Path | None:
    """Return the newest checkpoint of a healthy run, one from before the step if there is any.

    One with a state that is of no use to the optimizer, from before a resume, is not used.
    """
    writers = [one for one in trainer.callbacks if isinstance(one, Checkpoints)]  # type: ignore[attr-defined]
    healthy = {}
    for path in newest_first(writers[0].directory, "step_*.ckpt") if writers else []:
        manifest = read_manifest(path)
        if manifest is None or not manifest.is_healthy or manifest.rollout_step is None:
            continue
        step = manifest.rollout_step
        is_left = any(first <= step <= last for first, last in passed_over)
        if not is_left and (step < before_step or not only_before):
            healthy[path] = step
    (optimizer,) = trainer.optimizers
    usable = [
        path
        for path in healthy
        if not why_unusable(path, reads_all=True)
        and not has_other_optimizer(read_state(path), optimizer)
    ]
    return next((one for one in usable if healthy[one] < before_step), next(iter(usable), None))


def _apply_settings(trainer: L.Trainer, settings: list[list[dict[str, Any]]]) -> None:
    """Continue with the current settings of the optimizers, such as the learning rate."""
    for optimizer, groups in zip(trainer.optimizers, settings, strict=True):
        for group, present in zip(optimizer.param_groups, groups, strict=True):
            group.update(present)


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
