"""Turn rewards [B, G] into advantages [B, G]: how much better a completion is than a baseline.

Means and deviations are taken over the counted rows only: the valid rows of a group with at least
two of them. Every other row gets an advantage of exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from lit_grpo.objective.custom import Function, check_arguments, checked_advantages
from lit_grpo.types import RewardTable, UserError, check_range
from lit_grpo.types.field_types import check_fields
from lit_grpo.types.keywords import checks_keywords
from lit_grpo.types.rollouts import counted_rows

RELATIVE_TOLERANCE = 3e-7
"""Rewards of a group whose distance from their mean is at most this share of the largest one count
as equal. It lies between the rounding of a float32, 1.2e-7, and half a difference of a millionth:
the same reward may come as 0.3 and as ``np.float32(0.3)``."""


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """How rewards become advantages.

    Args:
        baseline: What is subtracted from a reward: the mean of its ``group``; the mean of the
            other rows of the group, ``leave_one_out`` (RLOO, arXiv 2402.14740 section 2.3); the
            mean of the group in which each row counts by its length, ``length_weighted`` (OPO,
            arXiv 2505.23585 equation 8); or the mean of the ``batch`` (REINFORCE++, arXiv
            2501.03262 equation 5), which gives an advantage to groups whose rewards are all equal.
        deviation: What the difference is divided by: the standard deviation of the ``group``
            (GRPO, arXiv 2402.03300 section 4.1.2) or of all rewards of the ``batch`` (Lite PPO,
            arXiv 2508.08221 section 5), the ``mean`` of the group (MaxRL, arXiv 2602.02710
            algorithm 1), or ``none`` (Dr. GRPO, arXiv 2503.20783 section 3.2).
        batch_statistics: What counts once in means and deviations over the batch: ``rows``, the
            completions, or ``tokens``, where a completion counts by its length (REINFORCE++,
            arXiv 2501.03262 equations 5 and 7).
        combine: ``sum_then_normalise`` adds the weighted rewards first. ``normalise_then_sum``
            computes advantages for each reward and adds these, so that a reward on a small scale
            keeps its influence (GDPO, arXiv 2601.05242 equations 4 and 7).
        rescale: Subtract the mean of the batch from the finished advantages and divide them by
            their deviation (GDPO, equation 6; REINFORCE++-baseline, arXiv 2501.03262 equation 7).
        discount: null gives all tokens of a completion its advantage. A number gives each token
            one of its own, from the rewards that come at it or after it, discounted by this factor
            per token: see `token_advantages`. 1 does not discount.
        function: Your own function (in a config: its import path) instead of all of the above. It
            gets a `RewardTable` and returns [B, G] advantages.

    Raises:
        UserError: the baseline and the deviation cannot be combined.
    """

    baseline: Literal["group", "leave_one_out", "length_weighted", "batch"] = "group"
    deviation: Literal["group", "batch", "mean", "none"] = "group"
    batch_statistics: Literal["rows", "tokens"] = "rows"
    combine: Literal["sum_then_normalise", "normalise_then_sum"] = "sum_then_normalise"
    rescale: bool = False
    discount: float | None = None
    function: Function | None = None

    def __post_init__(self) -> None:
        check_fields("model.advantage", self)
        if self.baseline == "batch" and self.deviation in ("group", "mean"):
            raise UserError(
                f"baseline: batch needs deviation: batch or none, got {self.deviation} (a group "
                "of equal rewards has an advantage under this baseline, but its own deviation or "
                "mean may be 0). Set model.advantage.deviation."
            )
        check_range("model.advantage.discount", self.discount, at_least=0, at_most=1)
        check_arguments("model.advantage.function", self.function, "table")
        if self.discount is not None:
            self._check_by_token()

    @property
    def own_functions(self) -> dict[str, Function]:
        """The user's function by its key, if there is one."""
        return {} if self.function is None else {"advantage.function": self.function}

    def _check_by_token(self) -> None:
        is_by_group = self.baseline == "group" and self.deviation in ("group", "none")
        is_by_batch = self.baseline == "batch" and self.batch_statistics == "tokens"
        if not (is_by_group or is_by_batch):
            raise UserError(
                "advantage.discount needs baseline: group with deviation: group or none, or "
                "baseline: batch with batch_statistics: tokens, got baseline: "
                f"{self.baseline}, deviation: {self.deviation}, batch_statistics: "
                f"{self.batch_statistics} (advantages by token are defined for those). Set "
                "model.advantage.baseline, or model.advantage.discount to null."
            )
        if self.combine == "normalise_then_sum" or self.rescale or self.function:
            raise UserError(
                "advantage.discount cannot be combined with normalise_then_sum, rescale or a "
                "function (they make one advantage per completion). Set model.advantage.discount "
                "to null."
            )


def _group_mean(rewards: Tensor, valid: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return [B, 1] means of each group's valid rows, which count by their weights [B, G]."""
    weights = valid if weights is None else torch.where(valid, weights, 0)
    total = (torch.where(valid, rewards, 0.0) * weights).sum(1, keepdim=True)
    return total / weights.sum(1, keepdim=True).clamp(min=1)


def center(rewards: Tensor, valid: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return [B, G] rewards minus the mean of their group's counted rows.

    The result is exactly 0 on rows that are not counted, and in groups whose rewards differ only by
    rounding errors.

    Args:
        weights: [B, G] how much each row counts in the mean; None for equal weights.
    """
    counted = counted_rows(valid)
    centered = torch.where(counted, rewards - _group_mean(rewards, valid, weights), 0.0)
    largest = torch.where(counted, rewards, 0.0).abs().amax(1, keepdim=True)
    has_spread = centered.abs().amax(1, keepdim=True) > RELATIVE_TOLERANCE * largest
    return torch.where(has_spread, centered, 0.0)


def has_signal(rewards: Tensor, valid: Tensor) -> Tensor:
    """Return [B] True on the groups whose counted rewards differ by more than rounding errors.

    ``reward/frac_zero_std`` and ``lit-grpo rewards`` use this definition. Dynamic sampling looks at
    the advantages instead, and `HealthMonitor` at both. Advantages are exactly 0 in a group without
    signal, except with ``baseline: batch`` or ``combine: normalise_then_sum``.
    """
    return center(rewards, valid).any(1)


def leave_one_out(rewards: Tensor, valid: Tensor) -> Tensor:
    """Return [B, G] rewards minus the mean of the other counted rows of their group.

    That is ``n / (n - 1)`` times `center` for n counted rows.
    """
    num_valid = valid.sum(1, keepdim=True)
    return center(rewards, valid) * num_valid / (num_valid - 1).clamp(min=1)


def center_over_batch(rewards: Tensor, valid: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return [B, G] rewards minus the mean of all counted rows of the batch.

    The result is exactly 0 if the rewards differ only by rounding errors.
    """
    one_group, counted = rewards.flatten()[None], counted_rows(valid).flatten()[None]
    weights = None if weights is None else weights.flatten()[None]
    return center(one_group, counted, weights).view_as(rewards)


BASELINES: dict[str, Callable[[RewardTable, Tensor | None], Tensor]] = {
    "group": lambda table, _: center(table.rewards, table.valid),
    "leave_one_out": lambda table, _: leave_one_out(table.rewards, table.valid),
    "length_weighted": lambda table, _: center(table.rewards, table.valid, table.lengths),
    "batch": lambda table, weights: center_over_batch(table.rewards, table.valid, weights),
}
"""The difference [B, G] from each ``baseline``, given the weights of the rows in the batch."""


def group_deviation(rewards: Tensor, valid: Tensor) -> Tensor:
    """Return [B, 1] sample deviations of each group's counted rows, 0 in a group without signal.

    The mean is computed first because ``E[x^2] - E[x]^2`` loses all precision when rewards are
    large and close to each other.
    """
    squares = center(rewards, valid).square().sum(1, keepdim=True)
    return (squares / (valid.sum(1, keepdim=True) - 1).clamp(min=1)).sqrt()


def batch_deviation(values: Tensor, valid: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the sample deviation of all counted rows of the batch, a scalar.

    With weights a row counts as so many samples.
    """
    counted = counted_rows(valid)
    weights = counted if weights is None else torch.where(counted, weights, 0)
    squares = (center_over_batch(values, valid, weights).square() * weights).sum()
    return (squares / (weights.sum() - 1).clamp(min=1)).sqrt()


def or_one(divisor: Tensor) -> Tensor:
    """Return the divisor, 1 where it is 0: there is no difference to divide.

    A constant added to it instead would shrink the advantages of rewards on a small scale.
    """
    return torch.where(divisor > 0, divisor, 1.0)


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
    return or_one(_group_mean(rewards, valid))


DEVIATIONS: dict[str, Callable[[RewardTable, Tensor | None], Tensor]] = {
    "group": lambda table, _: or_one(group_deviation(table.rewards, table.valid)),
    "batch": lambda table, weights: or_one(batch_deviation(table.rewards, table.valid, weights)),
    "mean": lambda table, _: group_success_rate(table.rewards, table.valid),
    "none": lambda table, _: table.rewards.new_ones(()),
}
"""The divisor for each ``deviation``, [B, 1] or a scalar, given the weights of the rows."""


def normalise(table: RewardTable, config: AdvantageConfig) -> Tensor:
    """Return [B, G] advantages of one reward, or of the sum of all."""
    weights = _batch_weights(table, config)
    difference = BASELINES[config.baseline](table, weights)
    return difference / DEVIATIONS[config.deviation](table, weights)


def compute_advantages(table: RewardTable, config: AdvantageConfig) -> Tensor:
    """Return [B, G] float64 advantages, exactly 0 on rows that are not counted."""
    if config.function is not None:
        return checked_advantages(config.function, table)
    if config.combine == "sum_then_normalise":
        advantages = normalise(table, config)
    else:
        advantages = _sum_of_normalised(table, config)
    if config.rescale:
        weights = _batch_weights(table, config)
        if weights is not None:  # otherwise, under every baseline, the mean is 0 already
            advantages = center_over_batch(advantages, table.valid, weights)
        advantages = advantages / or_one(batch_deviation(advantages, table.valid, weights))
    return advantages


def _sum_of_normalised(table: RewardTable, config: AdvantageConfig) -> Tensor:
    """Return [B, G] advantages, computed for each reward separately, weighted and added."""
    advantages = torch.zeros_like(table.rewards)
    magnitude = torch.zeros_like(advantages)
    for name, weight in table.weights.items():
        if weight != 0:  # a reward with weight 0 is only logged
            part = table.parts[name]
            own = replace(table, rewards=part, valid=table.valid & ~part.isnan())
            term = weight * normalise(own, config)
            advantages, magnitude = advantages + term, magnitude + term.abs()
    # Rewards that cancel each other leave a rounding error, which is not a signal.
    return torch.where(advantages.abs() > RELATIVE_TOLERANCE * magnitude, advantages, 0.0)


def _batch_weights(table: RewardTable, config: AdvantageConfig) -> Tensor | None:
    """Return [B, G] how much each row counts in the batch; None for equal weights."""
    return table.lengths if config.batch_statistics == "tokens" else None
