"""Number rollout steps as in messages, and log metrics that some of them do not have."""

from __future__ import annotations

import math
from collections.abc import Mapping

import lightning as L
import torch

from lit_grpo.stopping import is_step_unfinished


def step_number(trainer: L.Trainer) -> int:
    """Return the number of the running rollout step, in SFT batch, from 1, as the bar shows it.

    The files of a run count from 0: ``step`` of ``metrics.csv`` and ``completions/`` is one less.
    """
    return max(0, trainer.fit_loop.total_batch_idx) + 1


class StepLog:
    """Log the metrics of rollout steps; a metric without a value in this step becomes NaN.

    Lightning would log the last value of such a metric again.
    """

    def __init__(self) -> None:
        self._absent: dict[str, float] = {}

    def log(self, module: L.LightningModule, values: Mapping[str, float]) -> None:
        """Log the values of one step, from the same hook at every step; none of one left undone.

        Lightning would copy a float to the GPU and back; a tensor on the CPU stays there.
        """
        if is_step_unfinished(module.trainer):
            values = {}
        self._absent |= dict.fromkeys(values, math.nan)
        for number, (name, value) in enumerate((self._absent | dict(values)).items()):
            tensor = torch.tensor(value)
            # The first metric goes through Lightning, which resets its state at a new epoch.
            if number == 0 or not _log_again(module, name, tensor):
                module.log(name, tensor)


def _log_again(module: L.LightningModule, name: str, value: torch.Tensor) -> bool:
    """Log a further value of a metric; return False if this hook has not logged it before.

    ``module.log`` checks and copies all that it knows about a metric each time, which for all
    metrics of a step takes longer than the optimizer step of a small model.
    """
    results, key = module.trainer._results, f"{module._current_fx_name}.{name}"
    if results is None or key not in results:
        return False
    results.update_metrics(key, value, batch_size=1)
    return True
