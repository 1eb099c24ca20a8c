"""Let torch's Adam and AdamW take a step in one pass over the weights."""

from __future__ import annotations

import torch
from torch.optim import Adam, AdamW, Optimizer

DEVICES = {"cpu", "cuda"}


def choose_fused(optimizer: Optimizer) -> Optimizer:
    """Return Adam or AdamW with fused steps, unless its settings say how it takes them.

    If they do not, torch makes about eight passes over the weights on a CPU, and on a GPU a copy of
    all weights. The steps are the same except for rounding. Any other optimizer is left as it is.
    """
    if type(optimizer) not in (Adam, AdamW):
        return optimizer
    for settings in [optimizer.defaults, *optimizer.param_groups]:
        devices = {one.device.type for one in settings.get("params", ())}
        is_open = settings["fused"] is None and settings["foreach"] is None
        if is_open and not settings["differentiable"] and devices <= DEVICES:
            settings["fused"] = True
    return optimizer


def place_counts(optimizer: Optimizer) -> None:
    """Move the counts of steps to where torch's optimizers read them, after a change of settings.

    Fused steps, and those that a graph captures, read them on the device of the weights; the others
    on the CPU. Another optimizer is left as it is.
    """
    groups = optimizer.param_groups
    group_of = {parameter: group for group in groups for parameter in group["params"]}
    for parameter, state in optimizer.state.items():
        group = group_of.get(parameter, groups[0])  # stage 3 of DeepSpeed empties its groups
        count = state.get("step")
        if "fused" in group and isinstance(count, torch.Tensor):
            is_on_device = group["fused"] or group.get("capturable")
            state["step"] = count.to(parameter.device if is_on_device else "cpu")
