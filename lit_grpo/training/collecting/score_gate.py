"""Wait for the completions and scores of a step, and refuse to train if too many are missing.

Missing scores are retried at once and then after growing pauses, unless a bug is the reason. If too
many stay missing, the run stops and says why.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from lightning.pytorch.utilities import rank_zero_only

from lit_grpo.distributed.ranks import gather_objects
from lit_grpo.rewards.scoring.scoring import RewardFailed, Scoring
from lit_grpo.stopping import ExitCode
from lit_grpo.training.collecting.score_status import (
    NOT_TRAINED,
    ScoreStatus,
    over_ranks,
    score_status,
)
from lit_grpo.training.waiting import RankWaits, StepAbandoned, abandon_if_failed
from lit_grpo.types import RolloutBatch, check_range
from lit_grpo.types.field_types import check_fields
from lit_grpo.types.keywords import checks_keywords

log = logging.getLogger(__name__)


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class OutagePolicy:
    """Treatment of a rollout step whose scores are missing.

    A score is missing if its reward failed to give it for a reason outside the completion. While
    scores are missing for more than ``max_absent_fraction`` of a step's rows, the step is not
    trained on, and they are retried at once, then after pauses that double. If they stay missing,
    the run stops with exit code 4; a resumed run repeats the step. A bug of a reward on so many
    rows stops it at once, with exit code 1.

    Args:
        max_absent_fraction: Train on a step only if scores are missing for at most this share of
            its rows, over all ranks; from 0 to 1.
        first_pause_seconds: Pause before the second retry; the first one has none.
        max_pause_seconds: Longest pause.
        give_up_after_seconds: Longest sum of the pauses in one outage; 0 stops without a retry.
        score_deadline_seconds: A score that is missing this long after generation counts as a
            timeout; null leaves it to the ``timeout_seconds`` of each reward.

    Raises:
        UserError: a setting is out of range.
    """

    max_absent_fraction: float = 0.5
    first_pause_seconds: float = 10.0
    max_pause_seconds: float = 300.0
    give_up_after_seconds: float = 3600.0
    score_deadline_seconds: float | None = None

    def __post_init__(self) -> None:
        check_fields("model.outage", self)
        key = "model.outage."
        check_range(f"{key}max_absent_fraction", self.max_absent_fraction, at_least=0, at_most=1)
        check_range(f"{key}give_up_after_seconds", self.give_up_after_seconds, at_least=0)
        for name in ("first_pause_seconds", "max_pause_seconds", "score_deadline_seconds"):
            check_range(f"{key}{name}", getattr(self, name), above=0)

    def pauses(self) -> Iterator[float]:
        """Yield the seconds to wait before each retry; the first retry is immediate."""
        paused, pause = 0.0, self.first_pause_seconds
        if self.give_up_after_seconds:
            yield 0.0
        while paused < self.give_up_after_seconds:
            pause = min(pause, self.max_pause_seconds, self.give_up_after_seconds - paused)
            yield pause
            paused += pause
            pause *= 2


class ScoreGate:
    """Wait until enough rows of a rollout step have scores, together on all ranks."""

    def __init__(self, waiting: RankWaits, outage: OutagePolicy) -> None:
        self._waiting = waiting
        self._outage = outage
        self._has_worked: frozenset[str] = frozenset()
        """Rewards that have given a value or failed without a bug, on any rank, in this process."""
        self._seen: set[str] = set()
        """Rewards that have given a value or were named by a warning, in this process."""

    def wait_for_scores(
        self, scoring: Scoring | None, engine_failure: Exception | None = None
    ) -> RolloutBatch | None:
        """Return the scored rollouts of this rank; None on a rank without anything to score.

        Args:
            engine_failure: Why this rank's engine gave up; None if it did not.

        Raises:
            StepAbandoned: an engine gave up or has a bug, too many scores stay missing, or a
                callback ended the run during the wait.
        """
        abandon_if_failed(engine_failure)
        rollouts, status = self._attempt(scoring)
        pauses = self._outage.pauses()
        has_retried = False
        while status.num_absent > self._limit(status):
            pause = next(pauses, None)
            if pause is None:
                why = f"too many scores are missing: {status}"
                self._abandon(rollouts, f"Stopped because {why} {NOT_TRAINED} {status.advice}")
            when = f"in {pause:.0f} s" if pause >= 1 else "now"
            rank_zero_only(log.warning)(
                "Too many scores are missing to train on this step: %s Retrying %s.", status, when
            )
            if not has_retried:
                message = f"Too many scores are missing to train on this step: {status}"
                self._waiting.report_outage("score_outage", message)
            self._waiting.pause(pause)
            has_retried = True
            if scoring is not None:
                scoring.retry()
            rollouts, status = self._attempt(scoring)
        if has_retried:
            rank_zero_only(log.info)("Enough scores have arrived: training goes on.")
        return rollouts

    def _attempt(self, scoring: Scoring | None) -> tuple[RolloutBatch | None, ScoreStatus]:
        """Wait for the scores; return this rank's rollouts and the status over all ranks.

        Raises:
            StepAbandoned: retrying is pointless.
        """
        self._wait(scoring)
        rollouts, status = None, ScoreStatus()
        if scoring is not None:
            try:
                rollouts = scoring.result()
                status = score_status(rollouts, scoring.weighted_rewards)
            except RewardFailed as error:
                rollouts = scoring.so_far()
                status = ScoreStatus(fatal=f"{error}\n{error.bug}".strip())
        status = over_ranks(gather_objects(status))
        self._abandon_if_hopeless(status, rollouts)
        if scoring is not None:
            scoring.warn_of_bugs()
        self._warn_of_none(status)
        return rollouts, status

    def _warn_of_none(self, status: ScoreStatus) -> None:
        """Warn once of each reward that has returned None for every completion of a step."""
        self._seen |= status.with_value
        for name, message in status.without_value.items():
            if name not in self._seen:
                rank_zero_only(log.warning)("%s", message)
                self._seen.add(name)

    def _abandon_if_hopeless(self, status: ScoreStatus, rollouts: RolloutBatch | None) -> None:
        """Abandon the step if no retry can give enough scores."""
        self._abandon_on_bug(status, rollouts)
        if status.fatal:
            self._abandon(rollouts, f"Stopped: {status.fatal}")
        if status.num_not_sampled > self._limit(status):
            message = f"Stopped because completions could not be sampled: {status}"
            self._abandon(rollouts, message, cause="engine_outage")

    def _abandon_on_bug(self, status: ScoreStatus, rollouts: RolloutBatch | None) -> None:
        """Abandon the step if bugs withhold too many scores, or all scores of a reward so far.

        An async reward that has worked before may raise the exception of a bug because its service
        is down.
        """
        never_worked = status.only_bugs - self._has_worked
        if never_worked or status.num_with_bug > self._limit(status):
            name = min(never_worked) if never_worked else status.reward_with_most_bugs
            self._abandon(rollouts, status.describe_bug(name), ExitCode.CRASHED, "reward_bug")
        self._has_worked |= status.not_bugs

    def _abandon(
        self,
        rollouts: RolloutBatch | None,
        message: str,
        exit_code: int = ExitCode.SCORES_ABSENT,
        cause: str = "",
    ) -> NoReturn:
        """Abandon the step, and show the callbacks the rows of this rank.

        Raises:
            StepAbandoned: always; every rank must call this.
        """
        if rollouts is not None:
            self._waiting.report_abandoned_rollouts(rollouts)
        raise StepAbandoned(message, exit_code, cause)

    def _limit(self, status: ScoreStatus) -> float:
        """Return how many rows may have no score."""
        return self._outage.max_absent_fraction * status.num_rows

    def _wait(self, scoring: Scoring | None) -> None:
        """Wait until every rank has its scores; past the deadline, missing ones become timeouts."""
        limit = self._outage.score_deadline_seconds
        start = time.monotonic()

        def wait(seconds: float) -> bool:
            if scoring is not None and limit and time.monotonic() - start > limit:
                scoring.expire(limit)
            return scoring is None or scoring.wait(seconds)

        self._waiting.until_done(wait)
