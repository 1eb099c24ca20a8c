"""Wait for the completions and scores of a step, and refuse to train if too many are missing.

Missing scores are retried at once and then after growing pauses. If they stay missing, the run
stops and says why. The values of scores do not matter here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lightning.pytorch.utilities import rank_zero_only

from lit_grpo.diagnostics import Failure, find_failure
from lit_grpo.distributed import gather_objects
from lit_grpo.rewards.scoring import RewardFailed, Scoring
from lit_grpo.stopping import ExitCode
from lit_grpo.training.waiting import StepAbandoned, Waiting, abandon_if_failed
from lit_grpo.types import Outcome, RolloutBatch, Score, check_range

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class OutagePolicy:
    """What to do with a rollout step whose scores are missing.

    A score is missing if its reward failed to give it for a reason outside the completion. While
    scores are missing for more than ``max_absent_fraction`` of a step's rows, the step is not
    trained on, and they are retried at once, then after pauses that double. If they stay missing,
    the run stops with exit code 4; a resumed run repeats the step.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreStatus:
    """Which scores of a step are missing, on one rank or on all."""

    num_rows: int = 0
    num_missing: int = 0
    """Rows that a retry may still score."""
    num_not_sampled: int = 0
    """Rows without a completion, which cannot be scored."""
    failure: Failure | None = None
    fatal: str = ""
    """Why retrying is pointless; empty if it may help."""
    bugs: Mapping[str, str] = field(default_factory=dict)
    """Name of a reward -> a bug that made it fail on some row."""
    not_bugs: frozenset[str] = frozenset()
    """Names of the rewards that gave a value or failed for another reason on some row."""

    @property
    def only_bugs(self) -> frozenset[str]:
        """Names of the rewards that failed by a bug on every row."""
        return frozenset(self.bugs) - self.not_bugs

    @property
    def num_absent(self) -> int:
        """Rows without a score."""
        return self.num_missing + self.num_not_sampled

    @property
    def advice(self) -> str:
        """What to do when the run has stopped."""
        if self.num_absent == self.num_rows:
            return "Fix the cause and resume."
        return "Fix the cause and resume, or raise model.outage.max_absent_fraction."

    def __str__(self) -> str:
        share = self.num_absent / self.num_rows
        return (
            f"{self.num_absent} of the {self.num_rows} rows ({share:.0%}) have no score: "
            f"{self.failure}"
        )


class ScoreGate:
    """Wait until enough rows of a rollout step have scores, together on all ranks."""

    def __init__(self, waiting: Waiting, policy: OutagePolicy) -> None:
        self._waiting = waiting
        self._policy = policy
        self._has_worked: frozenset[str] = frozenset()
        """Names of the rewards of which some call in this process had no bug, on any rank."""

    def wait_for_scores(
        self, scoring: Scoring | None, engine_failure: str = ""
    ) -> RolloutBatch | None:
        """Return the scored rollouts of this rank; None on a rank without anything to score.

        Args:
            engine_failure: Why this rank's engine gave up; empty if it did not.

        Raises:
            StepAbandoned: an engine gave up, too many scores stay missing, or a callback ended the
                run during the wait.
        """
        abandon_if_failed(engine_failure)
        rollouts, status = self._attempt(scoring)
        pauses = self._policy.pauses()
        has_retried = False
        while not self._can_train(status):
            pause = next(pauses, None)
            if pause is None:
                raise StepAbandoned(
                    f"Stopped because too many scores are missing: {status} The step was not "
                    f"trained on. {status.advice}"
                )
            when = f"in {pause:.0f} s" if pause else "now"
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
        """Wait for the scores; return this rank's rollouts and the status over all ranks."""
        self._wait(scoring)
        rollouts, status = None, ScoreStatus()
        if scoring is not None:
            try:
                rollouts = scoring.result()
                status = score_status(rollouts, scoring.counted_rewards)
            except RewardFailed as error:
                status = ScoreStatus(fatal=f"{error}\n{error.bug}".strip())
        return rollouts, _over_ranks(gather_objects(status))

    def _abandon_on_bug(self, status: ScoreStatus) -> None:
        """Abandon the step if a reward that has never worked fails by a bug on every row.

        A reward that has worked before may raise the same exception because its service is down.
        """
        for name in sorted(status.only_bugs - self._has_worked):
            raise StepAbandoned(
                f"Stopped because of a bug in reward {name!r}, which no retry heals. The step was "
                f"not trained on. {status.bugs[name]}\nTry the reward without training, "
                "with the same config: lit-grpo rewards; in Python, call its function on a few "
                "completions.",
                ExitCode.CRASHED,
                "reward_bug",
            )
        self._has_worked |= status.not_bugs

    def _can_train(self, status: ScoreStatus) -> bool:
        """Return whether few enough scores are missing.

        Raises:
            StepAbandoned: retrying is pointless.
        """
        self._abandon_on_bug(status)
        if status.fatal:
            raise StepAbandoned(f"Stopped: {status.fatal}")
        limit = self._policy.max_absent_fraction * status.num_rows
        if status.num_not_sampled > limit:
            message = f"Stopped because completions could not be sampled: {status}"
            raise StepAbandoned(message, cause="engine_outage")
        return status.num_absent <= limit

    def _wait(self, scoring: Scoring | None) -> None:
        """Wait until every rank has its scores; past the deadline, missing ones become timeouts."""
        limit = self._policy.score_deadline_seconds
        start = time.monotonic()

        def wait(seconds: float) -> bool:
            if scoring is not None and limit and time.monotonic() - start > limit:
                scoring.expire(limit)
            return scoring is None or scoring.wait(seconds)

        self._waiting.until_done(wait)


def score_status(rollouts: RolloutBatch, rewards: Sequence[str]) -> ScoreStatus:
    """Count the missing scores of these rewards on this rank."""
    rows = [
        [group.scores[name][index] for name in rewards]
        for group in rollouts.groups
        for index in range(rollouts.group_size)
    ]
    over_budget = [one for row in rows for one in row if one.outcome is Outcome.BUDGET_SPENT]
    return ScoreStatus(
        num_rows=len(rows),
        num_missing=sum(any(score.is_outage for score in row) for row in rows),
        num_not_sampled=len(rows) - len(rollouts.sampled),
        failure=find_failure(rollouts, rewards, _is_missing),
        fatal=f"the judge's budget is spent: {over_budget[0].detail}." if over_budget else "",
        bugs={name: bug for name in rewards if (bug := find_bug(rollouts, name))},
        not_bugs=frozenset(name for name in rewards if _has_other_result(rollouts, name)),
    )


def find_bug(rollouts: RolloutBatch, reward: str) -> str:
    """Describe a bug of a reward with a row that shows it; empty if there is none."""
    for group in rollouts.groups:
        for score in group.scores[reward]:
            if score.bug:
                columns = ", ".join(group.prompt.columns) or "none"
                return f"Row {group.prompt.id} with the columns {columns}:\n{score.bug}"
    return ""


def _has_other_result(rollouts: RolloutBatch, reward: str) -> bool:
    """Return whether the reward gave something else than a bug on some row."""
    scores = (score for group in rollouts.groups for score in group.scores[reward])
    return any(not score.bug and score.is_scorable for score in scores)


def _is_missing(score: Score) -> bool:
    """Return whether a score is missing; an abstention is not."""
    return score.is_outage or score.outcome is Outcome.NOT_SAMPLED


def _over_ranks(statuses: list[ScoreStatus]) -> ScoreStatus:
    worst = max(statuses, key=lambda one: one.failure.fraction if one.failure else 0.0)
    return ScoreStatus(
        num_rows=sum(one.num_rows for one in statuses),
        num_missing=sum(one.num_missing for one in statuses),
        num_not_sampled=sum(one.num_not_sampled for one in statuses),
        failure=worst.failure,
        fatal=next((one.fatal for one in statuses if one.fatal), ""),
        bugs={name: bug for one in statuses for name, bug in one.bugs.items()},
        not_bugs=frozenset().union(*(one.not_bugs for one in statuses)),
    )
