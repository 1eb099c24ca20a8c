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

from lit_grpo.types import RolloutBatch

DEVIATION_FLOOR = 1e-4
"""Added to a deviation before dividing, as GRPO implementations do."""

NOISE = 1e-9
"""A spread below this share of the largest reward of a group is rounding, not signal."""


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """How rewards become advantages.

    Args:
        deviation: What the centred rewards are divided by: the ``group``'s own deviation (GRPO,
            arXiv 2402.03300 section 4.1.2), that of the whole ``batch`` of centred rewards, or
            ``none`` (Dr. GRPO, arXiv 2503.20783 section 3.2).
        combine: ``sum_then_normalise`` weighs and adds the rewards first; ``normalise_then_sum``
            normalises each reward by itself first, so that a reward with small numbers is heard
            (GDPO, arXiv 2601.05242).
    """

    deviation: Literal["group", "batch", "none"] = "group"
    combine: Literal["sum_then_normalise", "normalise_then_sum"] = "sum_then_normalise"


def center(rewards: Tensor, valid: Tensor) -> Tensor:
    """[B, G] rewards minus the mean of their group's valid rows.

    Exactly 0 on invalid rows, in groups with fewer than two valid rows (a group of one has no
    baseline), and in groups whose rewards differ by rounding only.
    """
    kept = torch.where(valid, rewards, 0.0)
    num_valid = valid.sum(1, keepdim=True)
    centered = torch.where(valid, kept - kept.sum(1, keepdim=True) / num_valid.clamp(min=1), 0.0)
    spread = centered.abs().amax(1, keepdim=True)
    has_signal = (num_valid >= 2) & (spread > NOISE * kept.abs().amax(1, keepdim=True))
    return torch.where(has_signal, centered, 0.0)


def group_deviation(rewards: Tensor, valid: Tensor) -> Tensor:
    """[B, 1] sample deviation of each group's valid rows, 0 where a group has no signal.

    Two passes (mean first): ``E[x^2] - E[x]^2`` cancels when rewards are large and close.
    """
    squares = center(rewards, valid).square().sum(1, keepdim=True)
    return (squares / (valid.sum(1, keepdim=True) - 1).clamp(min=1)).sqrt()


def _over_group(rewards: Tensor, valid: Tensor) -> Tensor:
    return center(rewards, valid) / (group_deviation(rewards, valid) + DEVIATION_FLOOR)


def _over_batch(rewards: Tensor, valid: Tensor) -> Tensor:
    centered = center(rewards, valid)
    voters = valid & (valid.sum(1, keepdim=True) >= 2)
    deviation = (centered.square().sum() / (voters.sum() - 1).clamp(min=1)).sqrt()
    return centered / (deviation + DEVIATION_FLOOR)


NORMALISATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "group": _over_group,
    "batch": _over_batch,
    "none": center,
}


def compute_advantages(
    rollouts: RolloutBatch, weights: Mapping[str, float], config: AdvantageConfig
) -> Tensor:
    """[B, G] float64 advantages of the valid rows; exactly 0 on all others.

    Args:
        weights: reward name -> weight, for ``normalise_then_sum``.
    """
    normalise = NORMALISATIONS[config.deviation]
    if config.combine == "sum_then_normalise":
        return normalise(rollouts.rewards, rollouts.valid)
    advantages = torch.zeros_like(rollouts.rewards)
    for name, part in rollouts.parts.items():
        applies = rollouts.valid & ~part.isnan()
        advantages += weights[name] * normalise(part, applies)
    return advantages
