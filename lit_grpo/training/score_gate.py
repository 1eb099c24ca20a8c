"""Waits for a step's completions and scores; refuses to train where too many are absent.

Such a step is scored again, then the run pauses, then it ends with the cause. Nothing here knows
what a score is worth.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import lightning as L

from lit_grpo.diagnostics import Failure, find_failure
from lit_grpo.distributed import any_failure, gather_objects
from lit_grpo.rewards.scoring import RewardFailed, Scoring
from lit_grpo.stopping import ENGINE_EXIT_CODE
from lit_grpo.training.stages import notify
from lit_grpo.types import Outcome, RolloutBatch, StopReason, UserError

log = logging.getLogger(__name__)

EXIT_CODE = 4
SLICE_SECONDS = 1.0
"""How often a wait looks whether the run is to end."""


@dataclass(frozen=True, kw_only=True)
class OutagePolicy:
    """What becomes of a rollout step whose scores are absent.

    A step is never trained on while more than ``max_absent_fraction`` of its rows lack a score for
    a reason that lies outside the completion. Its absent scores are asked for again at once, then
    after pauses that double; in the end the run stops with exit code 4 and the step undone.

    Args:
        max_absent_fraction: Share of the rows over all ranks, from 0 to 1.
        first_pause_seconds: Before the second further attempt.
        max_pause_seconds: Longest pause.
        give_up_after_seconds: Pauses in a row, in all; 0 stops at the first outage.
        score_deadline_seconds: What has no score so long after generation counts as a timeout;
            null waits for as long as the rewards do.

    Raises:
        ValueError: a fraction beyond 0 and 1, or a negative time.
    """

    max_absent_fraction: float = 0.5
    first_pause_seconds: float = 10.0
    max_pause_seconds: float = 300.0
    give_up_after_seconds: float = 3600.0
    score_deadline_seconds: float | None = None

    def __post_init__(self) -> None:
        deadline = self.score_deadline_seconds
        rules = {
            "max_absent_fraction": (0 <= self.max_absent_fraction <= 1, "from 0 to 1"),
            "first_pause_seconds": (self.first_pause_seconds > 0, "positive"),
            "max_pause_seconds": (self.max_pause_seconds > 0, "positive"),
            "give_up_after_seconds": (self.give_up_after_seconds >= 0, ">= 0"),
            "score_deadline_seconds": (deadline is None or deadline > 0, "positive or null"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise UserError(
                    f"outage.{name} must be {rule}, got {getattr(self, name)}. "
                    f"Set model.outage.{name}."
                )

    def pauses(self) -> Iterator[float]:
        """Seconds to wait before each further attempt, the first of which comes at once."""
        paused, pause = 0.0, self.first_pause_seconds
        if self.give_up_after_seconds:
            yield 0.0
        while paused < self.give_up_after_seconds:
            pause = min(pause, self.max_pause_seconds, self.give_up_after_seconds - paused)
            yield pause
            paused += pause
            pause *= 2


class StepAbandoned(Exception):
    """The rollout step in flight is not to be trained on, and the run ends; on all ranks alike."""

    def __init__(self, message: str, exit_code: int = EXIT_CODE) -> None:
        super().__init__(message)
        self.reason = StopReason(exit_code=exit_code, message=message, is_step_unfinished=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreStatus:
    """How the scores of a step stand, on one rank or on all."""

    num_rows: int = 0
    num_absent: int = 0
    """Rows without a score that may get one yet."""
    num_failed: int = 0
    """Rows without a completion, which will get none."""
    failure: Failure | None = None
    final: str = ""
    """Why there is no sense in asking again; empty when there is."""

    def __str__(self) -> str:
        missing = self.num_absent + self.num_failed
        share = missing / self.num_rows
        return f"{missing} of the {self.num_rows} rows ({share:.0%}) have no score: {self.failure}"


class ScoreGate:
    """Awaits the scores of rollout steps under a policy; in step on all ranks."""

    def __init__(self, module: L.LightningModule, policy: OutagePolicy) -> None:
        self._module = module
        self._policy = policy

    def await_scores(
        self, scoring: Scoring | None, engine_failure: str = ""
    ) -> RolloutBatch | None:
        """The scored rollouts of this rank; None for a rank that has nothing to score.

        Args:
            engine_failure: Why this rank's engine gave up, so that there is nothing to wait for.

        Raises:
            StepAbandoned: an engine gave up, too many scores stay absent, or the run was asked to
                end meanwhile; on all ranks alike.
        """
        refuse_failed_engines(engine_failure)
        return self._await(scoring)

    def await_completions(self, land: Callable[[float], bool]) -> None:
        """Until every rank's completions are with its rewards, or its engine has given up.

        Args:
            land: Waits for so many seconds; says whether this rank's are.

        Raises:
            StepAbandoned: the run was asked to end meanwhile; on all ranks alike.
        """
        while not all(gather_objects(land(SLICE_SECONDS))):
            self._end_if_asked()

    def _await(self, scoring: Scoring | None) -> RolloutBatch | None:
        rollouts, standing = self._attempt(scoring)
        for pause in self._policy.pauses():
            if self._is_fit_to_train(standing):
                return rollouts
            when = f"in {pause:.0f} s" if pause else "now"
            log.warning("This step is not trained on: %s Asking again %s.", standing, when)
            self._pause(pause)
            if scoring is not None:
                scoring.ask_again()
            rollouts, standing = self._attempt(scoring)
        if self._is_fit_to_train(standing):
            return rollouts
        raise StepAbandoned(
            f"Stopped, since rewards are absent and stay so: {standing} No optimizer step was "
            "taken on them. Resume when it is mended, or set model.outage."
        )

    def _attempt(self, scoring: Scoring | None) -> tuple[RolloutBatch | None, ScoreStatus]:
        """What this rank has, and how all ranks stand."""
        self._wait(scoring)
        rollouts, mine = None, ScoreStatus()
        if scoring is not None:
            try:
                rollouts = scoring.result()
                mine = stand(rollouts, scoring.counted_rewards)
            except RewardFailed as error:
                mine = ScoreStatus(final=str(error))
        return rollouts, _over_ranks(gather_objects(mine))

    def _is_fit_to_train(self, standing: ScoreStatus) -> bool:
        if standing.final:
            raise StepAbandoned(f"Stopped: {standing.final}")
        limit = self._policy.max_absent_fraction * standing.num_rows
        if standing.num_failed > limit:
            raise StepAbandoned(f"Stopped, since completions could not be sampled: {standing}")
        return standing.num_absent + standing.num_failed <= limit

    def _wait(self, scoring: Scoring | None) -> None:
        """Until every rank has its scores, or has given them up."""
        limit = self._policy.score_deadline_seconds
        start = time.monotonic()
        while not all(gather_objects(scoring is None or scoring.wait(SLICE_SECONDS))):
            self._end_if_asked()
            if scoring is not None and limit and time.monotonic() - start > limit:
                scoring.expire(limit)

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while any(gather_objects(time.monotonic() < end)):
            time.sleep(max(0.0, min(SLICE_SECONDS, end - time.monotonic())))
            self._end_if_asked()

    def _end_if_asked(self) -> None:
        """Lets callbacks end the run; they hear of every second of waiting, on all ranks."""
        notify(self._module, "on_wait", None)
        if self._module.trainer.should_stop:
            raise StepAbandoned("Ended by a callback while it waited for completions or rewards.")


def refuse_failed_engines(failure: str) -> None:
    """Every rank must call it, with why its own engine gave up or nothing.

    Raises:
        StepAbandoned: the engine of any rank gave up.
    """
    if why := any_failure(failure):
        raise StepAbandoned(f"Stopped: {why}", ENGINE_EXIT_CODE)


def stand(rollouts: RolloutBatch, rewards: Sequence[str]) -> ScoreStatus:
    """How the scores of these rewards stand on this rank."""
    rows = [
        [group.scores[name][index] for name in rewards]
        for group in rollouts.groups
        for index in range(rollouts.group_size)
    ]
    spent = [one for row in rows for one in row if one.outcome is Outcome.BUDGET_SPENT]
    return ScoreStatus(
        num_rows=len(rows),
        num_absent=sum(any(score.is_outage for score in row) for row in rows),
        num_failed=len(rows) - len(rollouts.sampled),
        failure=find_failure(rollouts, rewards),
        final=f"the judge's money is spent: {spent[0].detail}." if spent else "",
    )


def _over_ranks(standings: list[ScoreStatus]) -> ScoreStatus:
    worst = max(standings, key=lambda one: one.failure.fraction if one.failure else 0.0)
    return ScoreStatus(
        num_rows=sum(one.num_rows for one in standings),
        num_absent=sum(one.num_absent for one in standings),
        num_failed=sum(one.num_failed for one in standings),
        failure=worst.failure,
        final=next((one.final for one in standings if one.final), ""),
    )
