"""Log metrics that some rollout steps do not have."""

from __future__ import annotations

import math
from collections.abc import Mapping

import lightning as L
import torch


class StepLog:
    """Log the metrics of rollout steps; a metric without a value in this step becomes NaN.

    Lightning would log the last value of such a metric again.
    """

    def __init__(self) -> None:
        self._absent: dict[str, float] = {}

    def log(self, module: L.LightningModule, values: Mapping[str, float]) -> None:
        """Log the values of one step, from the same hook at every step.

        Lightning would copy a float to the GPU and back; a tensor on the CPU stays there.
        """
        self._absent |= dict.fromkeys(values, math.nan)
        logged = self._absent | dict(values)
        module.log_dict({name: torch.tensor(value) for name, value in logged.items()})
