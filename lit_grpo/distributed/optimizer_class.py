"""Whether the state of an optimizer in a checkpoint is one that the current optimizer can use."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

SETTING = "model.optimizer"
"""Key of the class among the settings that a checkpoint keeps of its run."""
RATES = ("lr", "initial_lr")


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
    """Return the class of the optimizer whose state is in a checkpoint.

    None for a checkpoint of an earlier release, which does not name it.
    """
    name: str | None = checkpoint.get("run_settings", {}).get(SETTING)
    return name


def has_other_optimizer(checkpoint: Mapping[str, Any], optimizer: Any) -> bool:
    """Return whether the state in a checkpoint is of no use to an optimizer.

    It belongs to another class, or to settings with which the class keeps less.
    """
    is_other = earlier_class(checkpoint) not in (None, optimizer_class(optimizer))
    return is_other or lacks_state(checkpoint, optimizer)


def lacks_state(checkpoint: Mapping[str, Any], optimizer: Any) -> bool:
    """Return whether an optimizer needs a state that one with the settings before did not keep.

    Such settings are ``amsgrad`` of Adam and ``momentum`` of RMSprop and SGD. Both are tried with a
    parameter of 4 values; False if that is not possible.
    """
    optimizer = _innermost(optimizer)
    pairs = zip(checkpoint.get("optimizer_settings", ()), optimizer.param_groups, strict=False)
    return any(_needs_more(optimizer, before, group) for before, group in pairs)


def _needs_more(optimizer: Any, before: Mapping[str, Any], group: Mapping[str, Any]) -> bool:
    now = {name: value for name, value in group.items() if name != "params"}
    if all(now.get(name) == value for name, value in before.items() if name not in RATES):
        return False
    kept, needed = (_state_names(optimizer, one) for one in ({**now, **before}, now))
    return kept is not None and needed is not None and not needed <= kept


def _state_names(optimizer: Any, settings: Mapping[str, Any]) -> set[str] | None:
    """Return the names of an optimizer's state after a step; None if that cannot be tried.

    Another object of its class takes the step, and shares no container with it.
    """
    if hasattr(type(optimizer), "__del__"):  # which may free what both would have
        return None
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.ones(2, 2)
    trial = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name != "step":  # a schedule wraps the optimizer's own
            vars(trial)[name] = copy.copy(value) if isinstance(value, dict | list | set) else value
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        vars(trial)[name] = OrderedDict()
    trial.state = defaultdict(dict)
    on_cpu = {"capturable": False} if "capturable" in settings else {}
    trial.param_groups = [{**settings, **on_cpu, "params": [parameter]}]
    with torch.compiler.set_stance("force_eager"):  # some compile their step
        try:
            trial.step()
        except Exception:
            return None
    return {name for name, value in trial.state[parameter].items() if value is not None}
