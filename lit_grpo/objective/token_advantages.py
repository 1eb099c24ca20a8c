"""Advantages by token: a token is credited with the rewards that come at it or after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_grpo.objective.advantages import (
    RELATIVE_TOLERANCE,
    AdvantageConfig,
    center,
    group_deviation,
    or_one,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRewards:
    """The rewards of N completions by token, float64."""

    values: Tensor
    """[N, C] the weighted sum of the rewards that come at a token; 0 where none does."""
    has_reward: Tensor
    """[N, C] True where a reward comes."""
    mask: Tensor
    """[N, C] True on the tokens of counted rows."""
    group_size: int


def rewards_to_go(rewards: Tensor, discount: float) -> Tensor:
    """Return [N, C] for each token the sum of the rewards from it on, discounted by token."""
    found = torch.zeros_like(rewards)
    running = torch.zeros_like(rewards[:, 0])
    for position in range(rewards.shape[1] - 1, -1, -1):
        running = rewards[:, position] + discount * running
        found[:, position] = running
    return found


def token_advantages(
    rewards: TokenRewards, config: AdvantageConfig, gather: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return [N, C] float64 advantages, 0 outside the mask.

    With ``baseline: group`` each reward is normalised over all rewards of its group, at any token,
    and then summed from each token on (GRPO with process supervision, arXiv 2402.03300
    section 4.1.3). With ``baseline: batch`` the sums are normalised over all tokens
    (REINFORCE++, arXiv 2501.03262 equations 4 and 5).

    Args:
        gather: Returns the values of all ranks, of a one-dimensional tensor on this one.
    """
    assert config.discount is not None
    if config.baseline == "group":
        normalised = _normalise_in_groups(rewards, config)
        return rewards_to_go(normalised, config.discount) * rewards.mask
    returns = rewards_to_go(rewards.values, config.discount) * rewards.mask
    everywhere = gather(returns[rewards.mask])
    mean = everywhere.mean()
    if not _has_spread(everywhere - mean, everywhere):
        return torch.zeros_like(returns)
    difference = returns - mean
    if config.deviation == "batch":
        difference = difference / or_one(everywhere.std())
    return difference * rewards.mask


def _has_spread(difference: Tensor, values: Tensor) -> bool:
    """Return whether some value differs from the mean by more than its rounding."""
    if not len(values):
        return False
    return bool(difference.abs().max() > RELATIVE_TOLERANCE * values.abs().max())


def _normalise_in_groups(rewards: TokenRewards, config: AdvantageConfig) -> Tensor:
    """Return [N, C] rewards minus the mean of their group, divided by its deviation."""
    counted = rewards.has_reward & rewards.mask
    shape = (-1, rewards.group_size * rewards.values.shape[1])
    values, present = rewards.values.reshape(shape), counted.reshape(shape)
    difference = center(values, present)
    if config.deviation == "group":
        difference = difference / or_one(group_deviation(values, present))
    return difference.view_as(rewards.values)
