"""Optimizer steps that are skipped because their gradient is not finite."""

from __future__ import annotations

import logging
from collections.abc import Callable

from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from lit_grpo.stopping import ExitCode
from lit_grpo.types import StopReason

log = logging.getLogger(__name__)


class SkippedSteps:
    """Count the optimizer steps that are skipped in a row, log them, and say when to stop.

    The norm of a gradient is taken over all ranks, so all of them skip the same steps.

    Args:
        tell: Is given what is logged.
        limit: The run must stop when so many steps in a row were skipped.
        setting: The key that sets the limit, if one does.
        advice: What to look at first; empty, or a sentence with a space after it.
    """

    def __init__(
        self, tell: Callable[[str], None], limit: int, *, setting: str = "", advice: str = ""
    ) -> None:
        self._tell = tell
        self.limit = limit
        self.in_a_row = 0
        self._total = 0
        self._setting = f" ({setting})" if setting else ""
        self._advice = advice

    @property
    def num_at_limit(self) -> int:
        """Number of consecutive skipped steps if at the limit, else 0."""
        return self.in_a_row if self.in_a_row >= self.limit else 0

    def count(self, place: str, norm: Tensor) -> None:
        """Count a skipped optimizer step and log it.

        A single one is logged only if it is the 1st, 2nd, 4th, 8th, … since the start, a resume or
        a rollback; those that follow another skipped step are always logged.

        Args:
            place: Names the step by what is counted whether or not it is skipped, as ``rollout step
                3``. The number of the optimizer step stays the same until one is taken.
            norm: Norm of its gradient.
        """
        self.in_a_row += 1
        self._total += 1
        if self.in_a_row == 1 and self._total.bit_count() > 1:
            return
        message = (
            f"the gradient of {place} is not finite (norm {float(norm)}), so the optimizer step is "
            f"skipped: {self.in_a_row} in a row, of at most {self.limit}{self._setting}. "
            f"{self._advice}"
        ).rstrip()
        rank_zero_only(log.warning)(message)
        self._tell(message)

    def count_taken(self) -> None:
        """Note that an optimizer step was taken."""
        self.in_a_row = 0

    def forget(self) -> None:
        """Start again after a rollback: the next skipped step is logged as the first."""
        self.in_a_row = self._total = 0

    def load(self, in_a_row: int) -> None:
        """Go on from a checkpoint; a run that was stopped at the limit gets as many again."""
        self.in_a_row = in_a_row % self.limit

    def stop_reason(self) -> StopReason:
        message = (
            f"Stopped because the gradients of {self.in_a_row} optimizer steps in a row were not "
            f"finite. They were not applied. {self._advice}Resume with a lower learning rate, or "
            "from an earlier checkpoint (lit-grpo checkpoints RUN lists them)."
        )
        code = ExitCode.DIVERGED
        return StopReason(exit_code=code, message=message, cause="not_finite_gradient")
