"""Stop a run whose reward has been zero or missing for many rollout steps in a row.

Such a run learns nothing and may be wasting hours on failed rollouts.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from lit_grpo.diagnostics.causes.table import CAUSES
from lit_grpo.diagnostics.step_counts import StepCounts, count_step
from lit_grpo.diagnostics.step_findings import (
    how_it_began,
    is_one_text,
    is_stale,
    likely_causes,
    sample_completions,
)
from lit_grpo.diagnostics.step_log import step_number
from lit_grpo.distributed.ranks import gather_objects
from lit_grpo.runs.files.events import record_event
from lit_grpo.runs.health.monitor import of_all_ranks
from lit_grpo.stopping import ExitCode, for_this_run, has_taken_last_step, stop_run
from lit_grpo.types import RolloutBatch, StopReason, check_range
from lit_grpo.types.field_types import checks_types
from lit_grpo.types.keywords import checks_keywords

log = logging.getLogger(__name__)

NUM_REMEMBERED = 20
NUM_SHOWN = 3
"""Completions in the message."""


@checks_keywords
@checks_types
class ZeroRewardBreaker(Callback):
    """Stop a run after a streak of rollout steps without any reward, over all ranks.

    A step counts if every valid reward is exactly 0 or if no row is valid. The message names how
    many of each, whether rewards stopped at once or faded away, the likely cause, and some
    completions. The streak is saved in the checkpoint, and `Checkpoints` keeps one from before it.

    If the streak reaches its limit at the last step, the run finishes normally, and a warning at
    its end reports the streak, as for a shorter run in which no step had a reward.

    Args:
        alert_after: Length of a streak at which to warn.
        stop_after: Length of a streak at which to stop the run, with exit code 3.
        enabled: False leaves it out of the run, which has one otherwise.

    Raises:
        UserError: not 1 <= alert_after <= stop_after.
    """

    def __init__(self, alert_after: int = 5, stop_after: int = 10, enabled: bool = True) -> None:
        key = "ZeroRewardBreaker.init_args."
        check_range(f"{key}stop_after", stop_after, at_least=1)
        check_range(
            f"{key}alert_after",
            alert_after,
            at_least=1,
            at_most=stop_after,
            why="the warning must come before stop_after; alert_after is 5 unless it is set",
        )
        self.alert_after = alert_after
        self.stop_after = stop_after
        self.enabled = enabled
        self._shares: deque[float] = deque(maxlen=NUM_REMEMBERED)
        """Share of completions with a reward in the last steps that had any."""
        self._reset()

    def _reset(self) -> None:
        self.streak = 0
        self._unscored_steps = 0
        self._stale_steps = 0
        self._is_one_text = False
        self._since = ""

    @property
    def trouble(self) -> str:
        """Recent trouble, which `Checkpoints` asks for; empty if there is none."""
        return f"no reward for {self.streak} rollout steps in a row" if self.streak else ""

    @property
    def warning_at_end(self) -> str:
        """Warning about the rewards of a run that is done; empty if recent steps had one."""
        if self.streak == 0 or (self._shares and self.streak < self.alert_after):
            return ""
        if self.streak == 1:
            steps = "the last rollout step" if self._shares else "the only rollout step"
        else:
            which = "the last" if self._shares else "any of the"
            steps = f"{which} {self.streak} rollout steps"
        advice = CAUSES[self._cause].remedies[0]
        if self._cause == "no_reward" and self._shares:
            advice = how_it_began(self._shares, is_one_text=self._is_one_text)
        return f"No reward was earned in {steps}. {advice}"

    @property
    def _cause(self) -> str:
        """The name of the cause of the streak."""
        if self._stale_steps == self.streak:
            return "stale_rollouts"
        has_none = self._unscored_steps == self.streak and not self._stale_steps
        return "nothing_scored" if has_none else "no_reward"

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if not isinstance(outputs, Mapping) or "rollouts" not in outputs:
            return
        rollouts: RolloutBatch = outputs["rollouts"]
        own = int(rollouts.valid.sum()), int((rollouts.rewards[rollouts.valid] != 0).sum())
        num_valid, num_rewarded = map(sum, zip(*gather_objects(own), strict=True))
        if num_rewarded:
            self._shares.append(num_rewarded / num_valid)
            self._reset()
            return
        counts = of_all_ranks(count_step(rollouts))
        self._count(step_number(trainer), counts)
        # A run that has ended with such a streak gets as many steps again once it is resumed.
        in_part = (self.streak - 1) % self.stop_after + 1
        is_due, is_done = in_part == self.stop_after, has_taken_last_step(trainer)
        if not is_due and in_part != self.alert_after:
            return
        can_end = getattr(pl_module, "can_end", True)
        message = self._describe(rollouts, counts, can_end=can_end)
        if is_due and not is_done:
            reason = StopReason(exit_code=ExitCode.NO_REWARD, message=message, cause=self._cause)
            stop_run(trainer, reason)
        elif trainer.is_global_zero:
            if not is_done:
                end = self.streak - in_part + self.stop_after
                message += (
                    f"\nThe run will be stopped after {end} such steps, unless it has done all its "
                    "steps by then."
                )
            log.warning("%s", for_this_run(trainer, message))
            record_event(trainer, "alert", message, self._cause)

    def _count(self, step: int, counts: StepCounts) -> None:
        if self.streak == 0:
            self._since = f"rollout step {step}, {datetime.now():%Y-%m-%d %H:%M:%S}"
        self.streak += 1
        self._unscored_steps += not counts.num_valid
        self._stale_steps += is_stale(counts)
        self._is_one_text = is_one_text(counts)

    def _describe(self, rollouts: RolloutBatch, counts: StepCounts, *, can_end: bool) -> str:
        zero_steps = self.streak - self._unscored_steps
        kinds = {
            "every valid reward was exactly 0": zero_steps,
            "groups were dropped because their weights were too old": self._stale_steps,
            "no completion could be scored": self._unscored_steps - self._stale_steps,
        }
        what = ", and ".join(
            f"in {'all' if number == self.streak else number} of them {kind}"
            for kind, number in kinds.items()
            if number
        )
        # How rewards ended says nothing of steps whose rewards were not counted.
        began = ""
        if self._stale_steps != self.streak:
            began = f" {how_it_began(self._shares, is_one_text=self._is_one_text)}"
        lines = [
            f"No reward for {self.streak} rollout steps in a row, since {self._since}: {what}."
            f"{began} Likely cause:",
            *(f"- {cause}" for cause in likely_causes(rollouts, counts, can_end=can_end)),
            "Completions of this step:",
            *(f"- {line}" for line in sample_completions(rollouts, NUM_SHOWN)),
            "If such streaks are normal for this task, raise stop_after of ZeroRewardBreaker.",
        ]
        return "\n".join(lines)

    def state_dict(self) -> dict[str, Any]:
        return {
            "streak": self.streak,
            "unscored_steps": self._unscored_steps,
            "stale_steps": self._stale_steps,
            "is_one_text": self._is_one_text,
            "since": self._since,
            "shares": list(self._shares),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.streak = state_dict["streak"]
        self._unscored_steps = state_dict["unscored_steps"]
        self._stale_steps = state_dict.get("stale_steps", 0)
        self._is_one_text = state_dict.get("is_one_text", False)
        self._since = state_dict["since"]
        self._shares.extend(state_dict["shares"])
