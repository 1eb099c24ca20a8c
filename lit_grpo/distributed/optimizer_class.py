"""Whether the state of an optimizer in a checkpoint is one that the present optimizer can use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

SETTING = "model.optimizer"
"""Key of the class among the settings that a checkpoint keeps of its run."""


def optimizer_class(optimizer: Any) -> str:
    """Return the name of the class of an optimizer.

    One that wraps another and has the same state, such as DeepSpeed's, counts as what it wraps.
    """
    for inner in vars(optimizer).values():
        is_wrapped = isinstance(inner, Optimizer) and inner is not optimizer
        if is_wrapped and inner.state is optimizer.state:
            return optimizer_class(inner)
    return type(optimizer).__qualname__


def earlier_class(checkpoint: Mapping[str, Any]) -> str | None:
    """Return the class of the optimizer that a checkpoint has the state of.

    None if the checkpoint does not say it, as those of earlier releases.
    """
    name: str | None = checkpoint.get("run_settings", {}).get(SETTING)
    return name


def has_other_optimizer(checkpoint: Mapping[str, Any], optimizer: Any) -> bool:
    """Return whether a checkpoint has the state of another class of optimizers."""
    return earlier_class(checkpoint) not in (None, optimizer_class(optimizer))
