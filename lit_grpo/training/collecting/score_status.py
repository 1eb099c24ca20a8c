"""Find out which scores of a rollout step are missing, and why: outage, bug, or no completion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lit_grpo.diagnostics.absent_scores import Failure, find_failure, never_scored
from lit_grpo.stopping import IN_A_CONFIG, ROWS_ARE_KEPT
from lit_grpo.types import Outcome, RolloutBatch, Score

NOT_TRAINED = f"The step was not trained on{ROWS_ARE_KEPT}."
BEFORE_RESUMING = (
    "A resumed run stops again unless the limits.max_cost_usd of its judge is higher: raise it"
    f"{IN_A_CONFIG}."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreStatus:
    """Which scores of a step are missing, on one rank or on all."""

    num_rows: int = 0
    num_retriable: int = 0
    """Rows that a retry may still score."""
    num_with_bug: int = 0
    """Rows that no retry can score, because of a permanent bug of a reward."""
    num_not_sampled: int = 0
    """Rows without a completion, which cannot be scored."""
    failure: Failure | None = None
    fatal: str = ""
    """Why retrying is pointless; empty if it may help."""
    bugs: Mapping[str, str] = field(default_factory=dict)
    """Name of a reward -> a bug that made it fail on some row."""
    num_bugs: Mapping[str, int] = field(default_factory=dict)
    """Name of a reward -> the rows on which it has a permanent bug, if on any."""
    not_bugs: frozenset[str] = frozenset()
    """Names of the rewards that gave a value or failed for another reason on some row."""
    with_value: frozenset[str] = frozenset()
    """Names of the rewards that gave a value on some row."""
    without_value: Mapping[str, str] = field(default_factory=dict)
    """Name of a reward that returned None for all of a rank's rows -> a sentence on it."""

    @property
    def only_bugs(self) -> frozenset[str]:
        """Names of the rewards that failed by a bug on every row."""
        return frozenset(self.bugs) - self.not_bugs

    @property
    def reward_with_most_bugs(self) -> str:
        """Name of the reward with permanent bugs on the most rows; there must be one."""
        return max(self.num_bugs, key=self.num_bugs.__getitem__)

    @property
    def num_absent(self) -> int:
        """Rows without a score."""
        return self.num_retriable + self.num_with_bug + self.num_not_sampled

    @property
    def advice(self) -> str:
        """Advice for a run that has stopped."""
        if self.num_absent == self.num_rows:
            return "Fix the cause and resume."
        return "Fix the cause and resume, or raise model.outage.max_absent_fraction."

    def why_not_trained(self, max_absent_fraction: float) -> str:
        """Return what a run does with such a step if it is not trained on; empty if it is.

        Args:
            max_absent_fraction: As in ``OutagePolicy``.
        """
        if self.fatal:
            return f"A run would stop at such a step: {self.fatal}"
        most = max_absent_fraction * self.num_rows
        if self.num_absent <= most:
            return ""
        is_final = max(self.num_with_bug, self.num_not_sampled) > most
        does = "stop" if is_final else "pause, retry and in the end stop"
        return (
            f"A run would {does} at such a step: {self._absent} have no score, and "
            f"model.outage.max_absent_fraction is {max_absent_fraction:g}."
        )

    def describe_bug(self, name: str) -> str:
        """Return why a run ends because of the bug of a reward, with the row and the line."""
        where, advice = "every row", ""
        if name not in self.only_bugs:
            where = f"{self.num_bugs[name]} of the {self.num_rows} rows"
            advice = (
                " To train without such rows, let it return None for them, or raise "
                "model.outage.max_absent_fraction."
            )
        return (
            f"Stopped because of a bug in reward {name!r} on {where}, which a retry cannot fix. "
            f"{NOT_TRAINED} {self.bugs[name]}\nTry the reward without training: "
            f"lit-grpo rewards RUN.{advice}"
        )

    def __str__(self) -> str:
        return f"{self._absent} have no score: {self.failure}"

    @property
    def _absent(self) -> str:
        share = self.num_absent / self.num_rows
        return f"{self.num_absent} of the {self.num_rows} rows ({share:.0%})"


def score_status(rollouts: RolloutBatch, rewards: Sequence[str]) -> ScoreStatus:
    """Count the missing scores of these rewards on this rank."""
    rows = [
        [group.scores[name][index] for name in rewards]
        for group in rollouts.groups
        for index in range(rollouts.group_size)
    ]
    spent = find_spent_budget(rollouts, rewards)
    return ScoreStatus(
        num_rows=len(rows),
        num_retriable=sum(any(one.is_outage for one in row) for row in rows if not _has_bug(row)),
        num_with_bug=sum(map(_has_bug, rows)),
        num_not_sampled=len(rows) - len(rollouts.sampled),
        failure=find_failure(rollouts, rewards, _is_outage_or_not_sampled),
        fatal=f"{spent} {BEFORE_RESUMING}" if spent else "",
        bugs={name: bug for name in rewards if (bug := find_bug(rollouts, name))},
        num_bugs=Counter(
            name for row in rows for name, one in zip(rewards, row, strict=True) if one.is_permanent
        ),
        not_bugs=frozenset(name for name in rewards if _has_other_result(rollouts, name)),
        with_value=frozenset(
            name for name in rewards if any(one.is_ok for one in _scores(rollouts, name))
        ),
        without_value=never_scored(rollouts),
    )


def find_spent_budget(rollouts: RolloutBatch, rewards: Iterable[str]) -> str:
    """Return the message that a judge's budget is spent, with its amount; empty if none is."""
    for name in rewards:
        for group in rollouts.groups:
            for score in group.scores[name]:
                if score.outcome is Outcome.BUDGET_SPENT:
                    return f"the judge's budget is spent: {score.detail}."
    return ""


def find_bug(rollouts: RolloutBatch, reward: str) -> str:
    """Describe a bug of a reward with a row that shows it; empty if there is none."""
    for group in rollouts.groups:
        for score in group.scores[reward]:
            if score.bug:
                columns = ", ".join(group.prompt.columns) or "none"
                return f"Row {group.prompt.id} with the columns {columns}:\n{score.bug}"
    return ""


def _has_other_result(rollouts: RolloutBatch, reward: str) -> bool:
    """Return whether the reward gave anything other than a bug on some row."""
    return any(not one.bug and one.is_scorable for one in _scores(rollouts, reward))


def _scores(rollouts: RolloutBatch, reward: str) -> Iterator[Score]:
    return (score for group in rollouts.groups for score in group.scores[reward])


def is_absent(score: Score) -> bool:
    """Return whether a failure left a completion without this score; an abstention is none."""
    return _is_outage_or_not_sampled(score) or score.is_permanent


def _has_bug(row: Sequence[Score]) -> bool:
    """Return whether a permanent bug left a row without a score."""
    return any(score.is_permanent for score in row)


def _is_outage_or_not_sampled(score: Score) -> bool:
    """Return whether a score is missing; an abstention is not."""
    return score.is_outage or score.outcome is Outcome.NOT_SAMPLED


def over_ranks(statuses: Sequence[ScoreStatus]) -> ScoreStatus:
    """Add up the statuses of all ranks."""
    worst = max(statuses, key=lambda one: one.failure.fraction if one.failure else 0.0)
    return ScoreStatus(
        num_rows=sum(one.num_rows for one in statuses),
        num_retriable=sum(one.num_retriable for one in statuses),
        num_with_bug=sum(one.num_with_bug for one in statuses),
        num_not_sampled=sum(one.num_not_sampled for one in statuses),
        failure=worst.failure,
        fatal=next((one.fatal for one in statuses if one.fatal), ""),
        bugs={name: bug for one in statuses for name, bug in one.bugs.items()},
        num_bugs=sum((Counter(one.num_bugs) for one in statuses), Counter()),
        not_bugs=frozenset().union(*(one.not_bugs for one in statuses)),
        with_value=frozenset().union(*(one.with_value for one in statuses)),
        without_value={name: why for one in statuses for name, why in one.without_value.items()},
    )
