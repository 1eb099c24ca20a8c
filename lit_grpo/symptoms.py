"""What one rollout step shows of its health, in numbers and in words. Judges; warns nobody."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lit_grpo.failures import find_failure, shorten
from lit_grpo.types import RolloutBatch

MOST = 0.5
"""From this share of a step on, a symptom is called the likely cause."""
NO_ADVANTAGE = 1e-6
"""Rewards, or advantages, that are nearer to each other are equal."""


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
