"""What a rollout step shows of its health: which scores are absent and why, and likely causes.

Puts findings into numbers and words. Callbacks and commands decide what to do about them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_grpo.types import Group, Outcome, RolloutBatch, Score

SHOWN_CHARACTERS = 120

MOST = 0.5
"""From this share of a step on, a symptom is called the likely cause."""
NO_ADVANTAGE = 1e-6
"""Rewards, or advantages, that are nearer to each other are equal."""

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


def truncated_fraction(rollouts: RolloutBatch) -> float:
    return _fraction(completion.is_truncated for completion in rollouts.sampled)


def empty_fraction(rollouts: RolloutBatch) -> float:
    return _fraction(not completion.text.strip() for completion in rollouts.sampled)


def identical_fraction(rollouts: RolloutBatch) -> float:
    """Of the groups, those whose completions are all the same."""
    return _fraction(
        len({c.token_ids for c in group.completions}) == 1 for group in rollouts.groups
    )


def _fraction(holds: Iterable[bool]) -> float:
    counted = list(holds)
    return sum(counted) / max(1, len(counted))


def likely_causes(rollouts: RolloutBatch) -> list[str]:
    """Why a step has no reward, the likeliest cause first, each with what to do."""
    causes = []
    failure = find_failure(rollouts)
    if failure and failure.fraction >= MOST:
        causes.append(str(failure))
    if (fraction := empty_fraction(rollouts)) >= MOST:
        causes.append(
            f"{fraction:.0%} of the completions are empty. Look at the rollout engine's log: it "
            "may have lost its weights or its server."
        )
    if (fraction := truncated_fraction(rollouts)) >= MOST:
        causes.append(
            f"{fraction:.0%} of the completions were cut off before they ended, so their answers "
            "are missing. Raise model.sampling.max_tokens or ask for shorter answers."
        )
    if identical_fraction(rollouts) == 1:
        causes.append(
            "In every group all completions are identical. Raise model.sampling.temperature; if "
            "it is high already the policy has collapsed: start again from an earlier checkpoint "
            "with a lower learning rate."
        )
    return causes or [_never_matched(rollouts)]


def _never_matched(rollouts: RolloutBatch) -> str:
    group = rollouts.groups[0]
    names = ", ".join(repr(name) for name in group.scores) or "none"
    gold = "" if group.prompt.answer is None else f", whose answer is {group.prompt.answer!r},"
    return (
        f"The rewards ({names}) answer and give 0: no completion has the format or the answer "
        f"that they look for. Prompt {group.prompt.id!r}{gold} was completed with "
        f"{shorten(group.completions[0].text)!r}. Compare some rows of completions/; warm the "
        "policy up with lit-grpo sft, or set the reward to what the prompt asks for."
    )


def no_signal(rollouts: RolloutBatch) -> list[str]:
    """Why no group tells its completions apart, each reason a sentence; none where one does."""
    rewards, valid = rollouts.rewards, rollouts.valid
    if any(_differ(row[counts]) for row, counts in zip(rewards, valid, strict=True)):
        return []
    if reason := nothing_to_compare(rollouts):
        return [f"There is no signal: {reason}"]
    if not rewards[valid].any():
        return ["There is no signal: every reward is exactly 0.", *likely_causes(rollouts)]
    return [equal_rewards(rollouts)]


def nothing_to_compare(rollouts: RolloutBatch) -> str | None:
    """Why no group has rows to compare; None where one has."""
    if not rollouts.valid.any():
        failure = find_failure(rollouts)
        return f"no row is valid: {failure}" if failure else "no row is valid."
    if not rollouts.valid.sum(1).ge(2).any():
        return "no group has two valid rows to compare."
    return None


def equal_rewards(rollouts: RolloutBatch) -> str:
    """What it means that the rewards of every group are equal, and what may help."""
    if cancelling := _differing_parts(rollouts):
        return (
            f"All advantages are 0 although {' and '.join(cancelling)} differ inside groups: "
            "their weighted sum does not, they cancel out. Change the rewards' weights, or "
            "normalise each reward before the sum."
        )
    mean = rollouts.rewards[rollouts.valid].mean()
    return (
        f"All advantages are 0: inside each group all rewards are equal (their mean is {mean:.3g})"
        ", so only the KL and entropy terms move the policy. If it solves these prompts, give it "
        "harder ones; if it solves none, easier ones or a longer warm-up; if the rewards should "
        "differ, look at the reward. A larger model.group_size makes equal rewards rarer."
    )


def _differing_parts(rollouts: RolloutBatch) -> list[str]:
    return [
        repr(name)
        for name, part in rollouts.parts.items()
        if any(_differ(row[valid]) for row, valid in zip(part, rollouts.valid, strict=True))
    ]


def _differ(values: Tensor) -> bool:
    values = values[~torch.isnan(values)]
    return values.numel() > 1 and bool(values.max() - values.min() > NO_ADVANTAGE)
