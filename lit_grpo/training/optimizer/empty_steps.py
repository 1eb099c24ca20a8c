"""Rollout steps that take no optimizer step, and when they end a run.

A run of such steps would never reach ``max_steps``, which counts optimizer steps.
"""

from __future__ import annotations

import logging

from lightning.pytorch.utilities import rank_zero_only

from lit_grpo.stopping import ExitCode
from lit_grpo.types import StopReason

log = logging.getLogger(__name__)

MAX_EMPTY_STEPS = 50
"""Rollout steps in a row without an optimizer step after which a run ends."""
NOTHING_TO_TRAIN = (
    "it has no token to train on, since every row is invalid, filtered, of weights that are too "
    "old or the only valid one of its group. See reward/valid_fraction, rollout/stale_fraction and "
    "the outcomes in completions/."
)


class EmptySteps:
    """Count the rollout steps in a row that take no optimizer step, and log them."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def count(
        self, step: int, why: str = NOTHING_TO_TRAIN, cause: str = "nothing_trained"
    ) -> StopReason | None:
        """Count a step, numbered from 1; return the reason to end the run, or None to continue."""
        self.in_a_row += 1
        if self.in_a_row.bit_count() == 1:  # the 1st, 2nd, 4th, 8th, …
            rank_zero_only(log.warning)(
                "rollout step %d takes no optimizer step (%d in a row): %s",
                *(step, self.in_a_row, why),
            )
        if self.in_a_row != MAX_EMPTY_STEPS:
            return None
        message = (
            f"Stopped because {MAX_EMPTY_STEPS} rollout steps in a row took no optimizer step: "
            f"{why}"
        )
        return StopReason(exit_code=ExitCode.NO_REWARD, message=message, cause=cause)

    def reset(self) -> None:
        """Start counting again, since a rollout step is trained on."""
        self.in_a_row = 0

    def load(self, in_a_row: int) -> None:
        """Continue from a checkpoint; a run that was stopped at the limit gets as many again."""
        self.in_a_row = in_a_row % MAX_EMPTY_STEPS
