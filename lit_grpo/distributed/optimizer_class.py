"""Whether the state of an optimizer in a checkpoint is one that the present optimizer can use."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

SETTING = "model.optimizer"
"""Key of the class among the settings that a checkpoint keeps of its run."""


def optimizer_class(optimizer: Any) -> str:
    """Return the name of the class of an optimizer.

    One that wraps another and has the same state, such as DeepSpeed's, counts as what it wraps.
    """
    return type(_innermost(optimizer)).__qualname__


def _innermost(optimizer: Any) -> Any:
    for inner in vars(optimizer).values():
        is_wrapped = isinstance(inner, Optimizer) and inner is not optimizer
        if is_wrapped and inner.state is optimizer.state:
            return _innermost(inner)
    return optimizer


def earlier_class(checkpoint: Mapping[str, Any]) -> str | None:
    """Return the class of the optimizer that a checkpoint has the state of.

    None if the checkpoint does not say it, as those of earlier releases.
    """
    name: str | None = checkpoint.get("run_settings", {}).get(SETTING)
    return name


def has_other_optimizer(checkpoint: Mapping[str, Any], optimizer: Any) -> bool:
    """Return whether the state in a checkpoint is of no use to an optimizer.

    It is that of another class, or of settings with which the class keeps less.
    """
    is_other = earlier_class(checkpoint) not in (None, optimizer_class(optimizer))
    return is_other or lacks_state(checkpoint, optimizer)


def lacks_state(checkpoint: Mapping[str, Any], optimizer: Any) -> bool:
    """Return whether the settings of a class need a state that those before did not make.

    Such are ``amsgrad`` of Adam and ``momentum`` of RMSprop. It is tried with a parameter of 4
    values; False if that is not possible.
    """
    optimizer = _innermost(optimizer)
    now = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    before: Mapping[str, Any] = next(iter(checkpoint.get("optimizer_settings", ())), {})
    if all(now.get(name) == value for name, value in before.items()):
        return False
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.ones(2, 2)
    trial = copy.copy(optimizer)
    trial.state = defaultdict(dict)
    trial.param_groups = [{**now, **before, "params": [parameter]}]
    with torch.compiler.set_stance("force_eager"):  # some compile their step
        try:
            trial.step()
        except Exception:
            return False
        trial.param_groups[0].update(now)
        try:
            trial.step()
        except KeyError:
            return True
    return False
