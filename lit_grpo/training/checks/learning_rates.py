"""Warn of learning rates with which a run hardly learns, or is destroyed."""

from __future__ import annotations

import logging
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_only
from torch.optim import Optimizer

log = logging.getLogger(__name__)

HOW_TO_SET = (
    "Set model.optimizer.lr; in a program optimizer=functools.partial(torch.optim.AdamW, lr=...)."
)
FAR_BELOW = 0.2
"""Share of the usual learning rate of LoRA below which a run is warned."""


def warn_of_learning_rate(trainer: L.Trainer, module: Any) -> None:
    """Warn if the learning rate is never reached, or is far from any that is used.

    Args:
        module: A ``PolicyModule``.
    """
    warn_of_warm_up(trainer, module.warmup_steps)
    for optimizer in trainer.optimizers:
        warn_of_rate(optimizer, module)


@rank_zero_only
def warn_of_rate(optimizer: Optimizer, module: Any) -> None:
    """Warn of a learning rate of 0, and with Adam and its variants of an unusual one.

    Unusual are rates above 1, such as 1e4 for 1e-4; torch's default, if none was set; and with LoRA
    a rate for full fine-tuning.
    """
    wrapped = getattr(optimizer, "optimizer", optimizer)  # by DeepSpeed
    groups = optimizer.param_groups
    rates = [float(one.get("initial_lr", one["lr"])) for one in groups]  # before a schedule
    rate, name = rates[0], type(wrapped).__name__
    if not any(rates):
        log.warning("the learning rate is 0: the policy never changes. %s", HOW_TO_SET)
    if "adam" not in name.lower() or rate == 0:
        return
    if rate > 1:
        mantissa, exponent = f"{rate:.3e}".split("e")
        meant = f" Did you mean {float(f'{mantissa}e-{int(exponent)}'):g}?" if rate >= 100 else ""
        log.warning(
            "the learning rate is %g: %s moves each weight by about as much in every step, which "
            "destroys the policy at once.%s %s",
            *(rate, name, meant, HOW_TO_SET),
        )
    elif module.make_optimizer is type(wrapped):
        log.warning(
            "the optimizer is made by the class %s alone, with its own learning rate of %g, which "
            "is for small models: 1e-6 to 1e-5 are usual from 0.5B on. Set the rate with "
            "functools.partial(%s, lr=...).",
            *(name, rate, name),
        )
    elif module.policy.lora is not None and rate < FAR_BELOW * module.usual_lora_rate:
        log.warning(
            "the learning rate is %g, and policy.lora is set: LoRA usually takes about %g here, "
            "and with less the policy may hardly change. %s",
            *(rate, module.usual_lora_rate, HOW_TO_SET),
        )


@rank_zero_only
def warn_of_warm_up(trainer: L.Trainer, warmup_steps: int) -> None:
    """Warn if a run ends before its learning rate is reached."""
    if 0 < trainer.max_steps <= warmup_steps and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        log.warning(
            "the learning rate is never reached: model.warmup_steps is %d, and the run ends after "
            "%d optimizer steps (trainer.max_steps). Lower model.warmup_steps.",
            *(warmup_steps, trainer.max_steps),
        )
