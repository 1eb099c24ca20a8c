"""Scores without a value in a rollout step: which reward gave them, why, what to do about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from lit_grpo.diagnostics.step_counts import (
    Scores,
    StepCounts,
    count_asked,
    count_scores,
    without_value,
)
from lit_grpo.types import Outcome, RolloutBatch, Score
from lit_grpo.types.text import shorten_middle

ADVICE = {
    Outcome.ERROR: "Fix the exception, or check its service and credentials",
    Outcome.TIMEOUT: "Check its service, or give it more time",
    Outcome.RATE_LIMITED: "Lower its concurrency or raise its quota",
    Outcome.UNAVAILABLE: "Check that its service runs and can be reached",
    Outcome.CONTENT_FILTERED: "Check what the filter objects to, or have it relaxed",
    Outcome.OUT_OF_TOKENS: "Raise max_completion_tokens of its judge",
    Outcome.BUDGET_SPENT: "Raise limits.max_cost_usd of its judge",
    Outcome.PARSE_ERROR: "Compare its prompt with its replies",
    Outcome.ABSTAIN: "It returned None: check whether a return is missing, unless that is intended",
    Outcome.NOT_SAMPLED: "Check the rollout engine's log",
    Outcome.TRUNCATED: "Raise its max_tokens, or lower model.sampling.max_tokens",
}

BUG_ADVICE = "Fix the code of the reward; if it asks a service, look at what that replied"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The most common reason why a reward gave no value."""

    reward: str
    outcome: Outcome
    fraction: float
    """Share of this reward's scores that ended this way, other sources left out."""
    detail: str
    """Detail of one of them."""
    is_bug: bool = False
    """Whether they look like a mistake in the code of the reward."""

    @property
    def advice(self) -> str:
        return advice_on(self.outcome, is_bug=self.is_bug)

    def __str__(self) -> str:
        example = f", for instance: {shorten_middle(self.detail)}" if self.detail else ""
        return (
            f"{self.fraction:.0%} of the scores of reward {self.reward!r} ended as "
            f"{self.outcome}{example}. {self.advice}."
        )


def never_scored(rollouts: RolloutBatch) -> dict[str, str]:
    """Return a sentence by reward that returned None for every completion it was asked for.

    Empty if no row is valid, for which there is another finding.
    """
    found = {}
    for name in rollouts.groups[0].scores if rollouts.valid.any() else ():
        scores = [one for group in rollouts.groups for one in group.scores[name]]
        asked = [s for s in scores if s.is_for_source and s.outcome is not Outcome.NOT_SAMPLED]
        if asked and {one.outcome for one in asked} == {Outcome.ABSTAIN}:
            why = next((one.detail for one in asked if one.detail), ADVICE[Outcome.ABSTAIN])
            found[name] = (
                f"Reward {name!r} gave none of {len(asked)} completions a value, so it does not "
                f"count. {why[0].upper()}{why[1:].rstrip('.')}."
            )
    return found


def advice_on(outcome: Outcome, *, is_bug: bool) -> str:
    """Return what to do about scores that ended this way."""
    return BUG_ADVICE if is_bug else ADVICE[outcome]


def find_failure(
    rollouts: RolloutBatch,
    rewards: Collection[str] | None = None,
    counts_as_failure: Callable[[Score], bool] = lambda score: True,
) -> Failure | None:
    """Return the reward and outcome that most rows without a value share.

    None if every score has a value, or belongs to a reward that does not apply.

    Args:
        rewards: Names of the rewards to look at; all of them if None.
        counts_as_failure: Whether a score `without_value` counts; by default every one does.
    """
    counts, details = count_scores(
        (name, score)
        for name, score in without_value(rollouts, rewards)
        if counts_as_failure(score)
    )
    return _most_common(counts, details, count_asked(rollouts))


def most_common_failure(counts: StepCounts, outcome: Outcome | None = None) -> Failure | None:
    """Return the reward and outcome that most rows without a value share, like `find_failure`.

    Args:
        outcome: The only one to look at; None looks at all.
    """
    failures = counts.failures
    if outcome is not None:
        failures = Counter({one: number for one, number in failures.items() if one[1] == outcome})
    return _most_common(failures, counts.details, counts.asked)


def _most_common(
    counts: Counter[Scores], details: Mapping[Scores, str], asked: Mapping[str, int]
) -> Failure | None:
    if not counts:
        return None
    kind, count = counts.most_common(1)[0]
    name, outcome, is_bug = kind
    return Failure(
        reward=name,
        outcome=outcome,
        fraction=count / asked[name],
        detail=details[kind],
        is_bug=is_bug,
    )
