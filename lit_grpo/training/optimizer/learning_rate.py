"""The schedule of the learning rate: warm-up, decay, and the factors of the data's phases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

Schedule = Literal["constant", "linear", "cosine"]


def build_schedule(
    optimizer: Optimizer, name: Schedule, warmup_steps: int, num_steps: Callable[[], int]
) -> LambdaLR:
    """Return the schedule of an optimizer, which starts at step 0.

    Args:
        warmup_steps: Optimizer steps in which the learning rate rises from 0.
        num_steps: Returns the optimizer steps of the run, by whose end the rate has decayed. A
            constant rate does not call it.
    """
    schedule: LambdaLR
    if name == "constant":
        schedule = get_scheduler("constant_with_warmup", optimizer, warmup_steps)
    else:
        schedule = get_scheduler(name, optimizer, warmup_steps, num_steps())
    return schedule


def scale_learning_rate(schedule: Any, data: object) -> None:
    """Multiply the factors of a schedule by the factors of the data's phases, if it has any.

    Args:
        schedule: A ``LambdaLR``, before its first step.
        data: The data module; its ``lr_scale`` returns the factor of an optimizer step, from 0.
    """
    scale: Callable[[int], float] | None = getattr(data, "lr_scale", None)
    if scale is None:
        return
    schedule.lr_lambdas = [_scaled(factor, scale) for factor in schedule.lr_lambdas]
    rates = []
    for group, base, factor in zip(
        schedule.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True
    ):
        group["lr"] = base * factor(0)  # making the schedule has set it already
        rates.append(group["lr"])
    schedule._last_lr = rates


def _scaled(factor: Callable[[int], float], scale: Callable[[int], float]) -> Any:
    """Return both together as a plain function, which a schedule does not save."""

    def scaled(step: int) -> float:
        return factor(step) * scale(step)

    return scaled
