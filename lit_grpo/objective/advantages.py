"""Rewards [B, G] to advantages [B, G]: what a completion gained over its siblings.

Only valid rows vote in a mean or a deviation; all others get exactly 0. Nothing here knows where
a reward comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lit_grpo.types import RolloutBatch, UserError

DEVIATION_FLOOR = 1e-4
"""Added to a deviation before dividing, as GRPO implementations do."""

NOISE = 1e-9
"""A spread below this share of the largest reward of a group is rounding, not signal."""


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """How rewards become advantages.

    Args:
        baseline: What is taken off a reward: the mean of its ``group``; the mean of the others of
            the group, ``leave_one_out`` (RLOO, arXiv 2402.14740 section 2.3); the mean of the
            ``batch`` (REINFORCE++, arXiv 2501.03262 equation 5), under which a group whose rewards
            are equal has an advantage.
        deviation: What the difference is divided by: the deviation of the ``group`` (GRPO, arXiv
            2402.03300 section 4.1.2) or of all rewards of the ``batch`` (Lite PPO, arXiv
            2508.08221 section 5), the ``mean`` of the group (MaxRL, arXiv 2602.02710 algorithm 1),
            or ``none`` (Dr. GRPO, arXiv 2503.20783 section 3.2).
        combine: ``sum_then_normalise`` weighs and adds the rewards first; ``normalise_then_sum``
            does all of the above to each reward by itself, so that one with small numbers is
            heard (GDPO, arXiv 2601.05242 equations 4 and 7).
        rescale: Divide the finished advantages by their deviation over the batch (GDPO, equation
            6; REINFORCE++-baseline, arXiv 2501.03262 equation 7).

    Raises:
        ValueError: a baseline and a deviation that exclude each other.
    """

    baseline: Literal["group", "leave_one_out", "batch"] = "group"
    deviation: Literal["group", "batch", "mean", "none"] = "group"
    combine: Literal["sum_then_normalise", "normalise_then_sum"] = "sum_then_normalise"
    rescale: bool = False

    def __post_init__(self) -> None:
        if self.baseline == "batch" and self.deviation in ("group", "mean"):
            raise UserError(
                f"baseline: batch goes with deviation: batch or none, got {self.deviation} (a "
                "group whose rewards are equal has an advantage there, and its own deviation or "
                "mean may be 0). Set model.advantage.deviation."
            )


def counted_rows(valid: Tensor) -> Tensor:
    """[B, G] True on the rows that have a baseline: valid, and not alone in their group."""
    return valid & (valid.sum(1, keepdim=True) >= 2)


def _group_mean(rewards: Tensor, valid: Tensor) -> Tensor:
    """[B, 1] over the valid rows."""
    num_valid = valid.sum(1, keepdim=True).clamp(min=1)
    return torch.where(valid, rewards, 0.0).sum(1, keepdim=True) / num_valid


def center(rewards: Tensor, valid: Tensor) -> Tensor:
    """[B, G] rewards minus the mean of their group's valid rows.

    Exactly 0 on invalid rows, in groups with fewer than two valid rows (a group of one has no
    baseline), and in groups whose rewards differ by rounding only.
    """
    vote = counted_rows(valid)
    centered = torch.where(vote, rewards - _group_mean(rewards, valid), 0.0)
    largest = torch.where(vote, rewards, 0.0).abs().amax(1, keepdim=True)
    has_spread = centered.abs().amax(1, keepdim=True) > NOISE * largest
    return torch.where(has_spread, centered, 0.0)


def leave_one_out(rewards: Tensor, valid: Tensor) -> Tensor:
    """[B, G] rewards minus the mean of the group's other valid rows: ``n / (n - 1)`` times
    `center`."""
    num_valid = valid.sum(1, keepdim=True)
    return center(rewards, valid) * num_valid / (num_valid - 1).clamp(min=1)


def center_over_batch(rewards: Tensor, valid: Tensor) -> Tensor:
    """[B, G] rewards minus the mean of all rows that vote; exactly 0 where they differ by
    rounding only."""
    one_group, vote = rewards.flatten()[None], counted_rows(valid).flatten()[None]
    return center(one_group, vote).view_as(rewards)


BASELINES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "group": center,
    "leave_one_out": leave_one_out,
    "batch": center_over_batch,
}


def group_deviation(rewards: Tensor, valid: Tensor) -> Tensor:
    """[B, 1] sample deviation of each group's valid rows, 0 where a group has no signal.

    Two passes (mean first): ``E[x^2] - E[x]^2`` cancels when rewards are large and close.
    """
    squares = center(rewards, valid).square().sum(1, keepdim=True)
    return (squares / (valid.sum(1, keepdim=True) - 1).clamp(min=1)).sqrt()


def batch_deviation(values: Tensor, valid: Tensor) -> Tensor:
    """[] sample deviation of all rows that vote, in two passes."""
    vote = counted_rows(valid)
    squares = center_over_batch(values, valid).square().sum()
    return (squares / (vote.sum() - 1).clamp(min=1)).sqrt()


def _over_group(rewards: Tensor, valid: Tensor) -> Tensor:
    return group_deviation(rewards, valid) + DEVIATION_FLOOR


def _over_batch(rewards: Tensor, valid: Tensor) -> Tensor:
    return batch_deviation(rewards, valid) + DEVIATION_FLOOR


def group_success(rewards: Tensor, valid: Tensor) -> Tensor:
    """[B, 1] the mean of each group's valid rows, 1 where it is 0 (and so is every reward).

    Raises:
        ValueError: a reward below 0, of which no share of successes can be taken.
    """
    if (rewards[valid] < 0).any():
        raise UserError(
            "deviation: mean divides by a group's share of successes, which needs rewards >= 0, "
            f"got {rewards[valid].min():g}. Set model.advantage.deviation to group or none, or "
            "change the reward."
        )
    mean = _group_mean(rewards, valid)
    return torch.where(mean > 0, mean, 1.0)


def _over_nothing(rewards: Tensor, valid: Tensor) -> Tensor:
    return rewards.new_ones(())


DEVIATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "group": _over_group,
    "batch": _over_batch,
    "mean": group_success,
    "none": _over_nothing,
}


def normalise(rewards: Tensor, valid: Tensor, config: AdvantageConfig) -> Tensor:
    """[B, G] one reward, or the sum of all, to advantages."""
    difference = BASELINES[config.baseline](rewards, valid)
    return difference / DEVIATIONS[config.deviation](rewards, valid)


def compute_advantages(
    rollouts: RolloutBatch, weights: Mapping[str, float], config: AdvantageConfig
) -> Tensor:
    """[B, G] float64 advantages of the valid rows; exactly 0 on all others.

    Args:
        weights: reward name -> weight, for ``normalise_then_sum``.
    """
    if config.combine == "sum_then_normalise":
        advantages = normalise(rollouts.rewards, rollouts.valid, config)
    else:
        advantages = torch.zeros_like(rollouts.rewards)
        magnitude = torch.zeros_like(advantages)
        for name, weight in weights.items():
            if weight != 0:  # else it is monitored only
                part = rollouts.parts[name]
                applies = rollouts.valid & ~part.isnan()
                term = weight * normalise(part, applies, config)
                advantages, magnitude = advantages + term, magnitude + term.abs()
        # Rewards that cancel each other leave rounding, not signal.
        advantages = torch.where(advantages.abs() > NOISE * magnitude, advantages, 0.0)
    if config.rescale:
        # Their mean over the batch is 0 already, under each baseline.
        advantages = advantages / (batch_deviation(advantages, rollouts.valid) + DEVIATION_FLOOR)
    return advantages
