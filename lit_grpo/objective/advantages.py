"""Turn rewards [B, G] into advantages [B, G]: how much better a completion is than a baseline.

Means and deviations are taken over the counted rows only: the valid rows of a group with at least
two of them. Every other row gets an advantage of exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lit_grpo.types import RolloutBatch, UserError, counted_rows

DEVIATION_FLOOR = 1e-4
"""Added to a deviation before it divides, as GRPO implementations do."""

NOISE = 1e-9
"""Rewards of a group that differ by less than this share of the largest one count as equal: such a
difference is a rounding error."""


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """How rewards become advantages.

    Args:
        baseline: What is subtracted from a reward: the mean of its ``group``; the mean of the
            other rows of the group, ``leave_one_out`` (RLOO, arXiv 2402.14740 section 2.3); or the
            mean of the ``batch`` (REINFORCE++, arXiv 2501.03262 equation 5), which gives an
            advantage to groups whose rewards are all equal.
        deviation: What the difference is divided by: the standard deviation of the ``group``
            (GRPO, arXiv 2402.03300 section 4.1.2) or of all rewards of the ``batch`` (Lite PPO,
            arXiv 2508.08221 section 5), the ``mean`` of the group (MaxRL, arXiv 2602.02710
            algorithm 1), or ``none`` (Dr. GRPO, arXiv 2503.20783 section 3.2).
        combine: ``sum_then_normalise`` adds the weighted rewards first. ``normalise_then_sum``
            computes advantages for each reward and adds those, so that a reward on a small scale
            keeps its influence (GDPO, arXiv 2601.05242 equations 4 and 7).
        rescale: Divide the finished advantages by their deviation over the batch (GDPO, equation
            6; REINFORCE++-baseline, arXiv 2501.03262 equation 7).

    Raises:
        UserError: the baseline and the deviation cannot be combined.
    """

    baseline: Literal["group", "leave_one_out", "batch"] = "group"
    deviation: Literal["group", "batch", "mean", "none"] = "group"
    combine: Literal["sum_then_normalise", "normalise_then_sum"] = "sum_then_normalise"
    rescale: bool = False

    def __post_init__(self) -> None:
        if self.baseline == "batch" and self.deviation in ("group", "mean"):
            raise UserError(
                f"baseline: batch needs deviation: batch or none, got {self.deviation} (a group "
                "of equal rewards has an advantage under this baseline, but its own deviation or "
                "mean may be 0). Set model.advantage.deviation."
            )


def _group_mean(rewards: Tensor, valid: Tensor) -> Tensor:
    """Return [B, 1] means of each group's valid rows."""
    num_valid = valid.sum(1, keepdim=True).clamp(min=1)
    return torch.where(valid, rewards, 0.0).sum(1, keepdim=True) / num_valid


def center(rewards: Tensor, valid: Tensor) -> Tensor:
    """Return [B, G] rewards minus the mean of their group's counted rows.

    The result is exactly 0 on rows that are not counted, and in groups whose rewards differ only by
    rounding errors.
    """
    counted = counted_rows(valid)
    centered = torch.where(counted, rewards - _group_mean(rewards, valid), 0.0)
    largest = torch.where(counted, rewards, 0.0).abs().amax(1, keepdim=True)
    has_spread = centered.abs().amax(1, keepdim=True) > NOISE * largest
    return torch.where(has_spread, centered, 0.0)


def has_signal(rewards: Tensor, valid: Tensor) -> Tensor:
    """Return [B] True on the groups whose counted rewards differ by more than rounding errors.

    ``reward/frac_zero_std`` and ``lit-grpo rewards`` use this definition. Dynamic sampling and
    `SignalWarnings` look at the advantages instead. These are exactly 0 in a group without signal,
    except with ``baseline: batch`` or ``combine: normalise_then_sum``.
    """
    return center(rewards, valid).any(1)


def leave_one_out(rewards: Tensor, valid: Tensor) -> Tensor:
    """Return [B, G] rewards minus the mean of the other counted rows of their group.

    That is ``n / (n - 1)`` times `center` for n counted rows.
    """
    num_valid = valid.sum(1, keepdim=True)
    return center(rewards, valid) * num_valid / (num_valid - 1).clamp(min=1)


def center_over_batch(rewards: Tensor, valid: Tensor) -> Tensor:
    """Return [B, G] rewards minus the mean of all counted rows of the batch.

    The result is exactly 0 if the rewards differ only by rounding errors.
    """
    one_group, counted = rewards.flatten()[None], counted_rows(valid).flatten()[None]
    return center(one_group, counted).view_as(rewards)


BASELINES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "group": center,
    "leave_one_out": leave_one_out,
    "batch": center_over_batch,
}


def group_deviation(rewards: Tensor, valid: Tensor) -> Tensor:
    """Return [B, 1] sample deviations of each group's counted rows, 0 in a group without signal.

    The mean is computed first because ``E[x^2] - E[x]^2`` loses all precision when rewards are
    large and close to each other.
    """
    squares = center(rewards, valid).square().sum(1, keepdim=True)
    return (squares / (valid.sum(1, keepdim=True) - 1).clamp(min=1)).sqrt()


def batch_deviation(values: Tensor, valid: Tensor) -> Tensor:
    """Return the sample deviation of all counted rows of the batch, a scalar."""
    counted = counted_rows(valid)
    squares = center_over_batch(values, valid).square().sum()
    return (squares / (counted.sum() - 1).clamp(min=1)).sqrt()


def _group_divisor(rewards: Tensor, valid: Tensor) -> Tensor:
    return group_deviation(rewards, valid) + DEVIATION_FLOOR


def _batch_divisor(rewards: Tensor, valid: Tensor) -> Tensor:
    return batch_deviation(rewards, valid) + DEVIATION_FLOOR


def group_success_rate(rewards: Tensor, valid: Tensor) -> Tensor:
    """Return [B, 1] means of each group's valid rows; 1 for a group whose rewards are all 0.

    Raises:
        UserError: a reward is negative, so the mean is not a success rate.
    """
    if (rewards[valid] < 0).any():
        raise UserError(
            "deviation: mean divides by the success rate of a group, which needs rewards >= 0, "
            f"got {rewards[valid].min():g}. Set model.advantage.deviation to group or none, or "
            "change the reward."
        )
    mean = _group_mean(rewards, valid)
    return torch.where(mean > 0, mean, 1.0)


def _no_divisor(rewards: Tensor, valid: Tensor) -> Tensor:
    return rewards.new_ones(())


DEVIATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "group": _group_divisor,
    "batch": _batch_divisor,
    "mean": group_success_rate,
    "none": _no_divisor,
}
"""The divisor for each choice of ``deviation``: [B, 1], or a scalar."""


def normalise(rewards: Tensor, valid: Tensor, config: AdvantageConfig) -> Tensor:
    """Return [B, G] advantages of one reward, or of the sum of all."""
    difference = BASELINES[config.baseline](rewards, valid)
    return difference / DEVIATIONS[config.deviation](rewards, valid)


def compute_advantages(
    rollouts: RolloutBatch, weights: Mapping[str, float], config: AdvantageConfig
) -> Tensor:
    """Return [B, G] float64 advantages, exactly 0 on rows that are not counted.

    Args:
        weights: Weight of each reward by name, for ``normalise_then_sum``.
    """
    if config.combine == "sum_then_normalise":
        advantages = normalise(rollouts.rewards, rollouts.valid, config)
    else:
        advantages = torch.zeros_like(rollouts.rewards)
        magnitude = torch.zeros_like(advantages)
        for name, weight in weights.items():
            if weight != 0:  # a reward with weight 0 is only logged
                part = rollouts.parts[name]
                has_value = rollouts.valid & ~part.isnan()
                term = weight * normalise(part, has_value, config)
                advantages, magnitude = advantages + term, magnitude + term.abs()
        # Rewards that cancel each other leave a rounding error, which is no signal.
        advantages = torch.where(advantages.abs() > NOISE * magnitude, advantages, 0.0)
    if config.rescale:
        # No centering is needed: under every baseline the mean over the batch is already 0.
        advantages = advantages / (batch_deviation(advantages, rollouts.valid) + DEVIATION_FLOOR)
    return advantages
