"""Let torch's Adam and AdamW take a step in one pass over the weights."""

from __future__ import annotations

from torch.optim import Adam, AdamW, Optimizer

DEVICES = {"cpu", "cuda"}


def choose_fused(optimizer: Optimizer) -> Optimizer:
    """Return Adam or AdamW with fused steps, unless its settings say how it takes them.

    If they do not, torch makes about eight passes over the weights on a CPU, and on a GPU a copy of
    all weights. The steps are the same but for rounding. Any other optimizer is left as it is.
    """
    if type(optimizer) not in (Adam, AdamW):
        return optimizer
    for settings in [optimizer.defaults, *optimizer.param_groups]:
        devices = {one.device.type for one in settings.get("params", ())}
        is_open = settings["fused"] is None and settings["foreach"] is None
        if is_open and not settings["differentiable"] and devices <= DEVICES:
            settings["fused"] = True
    return optimizer
