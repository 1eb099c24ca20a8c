"""Which scores of a rollout step are absent, and why, in numbers and words. Judges nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from lit_grpo.types import Group, Outcome, RolloutBatch, Score

SHOWN_CHARACTERS = 120

ADVICE = {
    Outcome.ERROR: "Look at its service and its credentials",
    Outcome.TIMEOUT: "Look at its service, or give it more time",
    Outcome.RATE_LIMITED: "Lower its concurrency or raise its quota",
    Outcome.UNAVAILABLE: "Look at whether its service runs and can be reached",
    Outcome.CONTENT_FILTERED: "Look at what the filter objects to, or have it loosened",
    Outcome.OUT_OF_TOKENS: "Raise max_completion_tokens of its judge",
    Outcome.BUDGET_SPENT: "Raise limits.max_cost_usd of its judge",
    Outcome.PARSE_ERROR: "Look at what it is asked and what it answers",
    Outcome.ABSTAIN: "Look at why it declines to score these prompts",
    Outcome.NOT_SAMPLED: "Look at the rollout engine's log",
    Outcome.TRUNCATED: "Raise model.sampling.max_tokens, or let it score truncated completions",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The most common way in which a reward failed to give a value."""

    reward: str
    outcome: Outcome
    fraction: float
    """Of this reward's scores, those that ended this way."""
    detail: str
    """What one of them says."""

    def __str__(self) -> str:
        sample = f", for instance: {shorten(self.detail)}" if self.detail else ""
        return (
            f"{self.fraction:.0%} of the scores of reward {self.reward!r} ended as "
            f"{self.outcome}{sample}. {ADVICE[self.outcome]}."
        )


def find_failure(rollouts: RolloutBatch, rewards: Collection[str] | None = None) -> Failure | None:
    """The failing outcome that most rows share, of all rewards or of some.

    None where every score has a value.
    """
    counts: Counter[tuple[str, Outcome]] = Counter()
    details: dict[tuple[str, Outcome], str] = {}
    num_rows = 0
    for group in rollouts.groups:
        num_rows += len(group.completions)
        for name, score in _failed_scores(group, rewards or group.scores.keys()):
            counts[name, score.outcome] += 1
            details.setdefault((name, score.outcome), score.detail)
    if not counts:
        return None
    (name, outcome), count = counts.most_common(1)[0]
    return Failure(
        reward=name, outcome=outcome, fraction=count / num_rows, detail=details[name, outcome]
    )


def _failed_scores(group: Group, rewards: Collection[str]) -> list[tuple[str, Score]]:
    return [(name, one) for name in rewards for one in group.scores[name] if not one.is_ok]


def shorten(text: str) -> str:
    """The end of a long text: that is where an error's cause and an answer stand."""
    text = text.strip()
    return text if len(text) <= SHOWN_CHARACTERS else "…" + text[-SHOWN_CHARACTERS:]
