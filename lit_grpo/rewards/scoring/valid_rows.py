"""Combine the scores of a rollout step into a ``RolloutBatch``, and decide which rows are valid.

Later, `RolloutBatch.without_stale` may exclude whole groups from ``valid``, for stale weights. Of
the valid rows, `counted_rows` (types/rollouts.py) and then `trained_rows` (training/batching.py)
exclude single ones from the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

import torch
from torch import Tensor

from lit_grpo.rewards.reward import Reward
from lit_grpo.types import Group, Outcome, RolloutBatch, Score


def weighted_names(rewards: Iterable[Reward]) -> list[str]:
    """Return the names of the rewards that decide: those with a weight other than 0."""
    return [reward.name for reward in rewards if reward.weight]


def combine(rewards: Sequence[Reward], groups: Iterable[Group]) -> RolloutBatch:
    """Sum each row's values with the weights of their rewards, and mark the valid rows.

    The reward of an invalid row is NaN. The row is logged but excluded from the group mean and the
    loss, so a failure never acts as a zero. Rewards with weight 0 are only monitored; the
    others decide:

    1. A row without a completion (the engine failed to sample it) is not valid.
    2. A reward that abstained on all sampled rows of a group, or is only for other sources, does
       not apply to that prompt, and is left out of the sum.
    3. A row is valid if every reward that applies gave it a value, and at least one applies.
    4. If a reward with ``on_error: drop_group`` failed on a row (neither a value nor an
       abstention), no row of its group is valid.
    """
    groups = tuple(groups)
    parts = {reward.name: _values(groups, reward.name) for reward in rewards}
    total = torch.zeros(len(groups), len(groups[0].completions), dtype=torch.float64)
    valid = torch.tensor([[not c.is_failed for c in group.completions] for group in groups])
    any_applies = torch.zeros(len(groups), 1, dtype=torch.bool)
    for reward in filter(attrgetter("weight"), rewards):
        part = parts[reward.name]
        applies = _where(groups, reward.name, _is_not_abstention).any(1, keepdim=True)
        any_applies |= applies
        valid &= ~applies | ~part.isnan()
        if reward.on_error == "drop_group":
            valid &= ~_where(groups, reward.name, attrgetter("is_failure")).any(1, keepdim=True)
        total += torch.where(applies, reward.weight * part, 0.0)
    valid &= any_applies
    return RolloutBatch(
        groups=groups,
        rewards=total.masked_fill(~valid, torch.nan),
        parts=parts,
        valid=valid,
    )


def _values(groups: Sequence[Group], name: str) -> Tensor:
    nan = float("nan")
    rows = [
        [nan if score.value is None else score.value for score in group.scores[name]]
        for group in groups
    ]
    return torch.tensor(rows, dtype=torch.float64)


def _where(groups: Sequence[Group], name: str, test: Callable[[Score], bool]) -> Tensor:
    return torch.tensor([[test(score) for score in group.scores[name]] for group in groups])


def _is_not_abstention(score: Score) -> bool:
    return score.is_for_source and score.outcome not in (Outcome.ABSTAIN, Outcome.NOT_SAMPLED)
