"""Scores of a rollout step -> its RolloutBatch: the one place that says which rows count.

A failure is never a zero: a row without a value is left out, it does not get one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from lit_grpo.rewards.reward import Reward
from lit_grpo.types import Group, Outcome, RolloutBatch, Score


def combine(rewards: Sequence[Reward], groups: Iterable[Group]) -> RolloutBatch:
    """Sums the parts of every row by the weights of their rewards.

    The rule, for rewards of non-zero weight (the others are monitored only):

    1. A reward that abstained on all rows of a group does not apply to that prompt: it is left
       out of the sum. (Rows that were not sampled have no say in this.)
    2. A row is valid when every reward that applies gave it a value, and at least one applies.
    3. A reward that failed (neither a value nor an abstention) on one row of a group makes the
       whole group invalid if its ``on_error`` is ``drop_group``.
    """
    groups = tuple(groups)
    parts = {reward.name: _values(groups, reward.name) for reward in rewards}
    total = torch.zeros(len(groups), len(groups[0].completions), dtype=torch.float64)
    valid = torch.tensor([[not c.is_failed for c in group.completions] for group in groups])
    any_applies = torch.zeros(len(groups), 1, dtype=torch.bool)
    for reward in (reward for reward in rewards if reward.weight):
        part = parts[reward.name]
        applies = _where(groups, reward.name, _is_statement).any(1, keepdim=True)
        any_applies |= applies
        valid &= ~applies | ~part.isnan()
        if reward.on_error == "drop_group":
            valid &= ~_where(groups, reward.name, _is_failure).any(1, keepdim=True)
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


def _is_statement(score: Score) -> bool:
    return score.outcome not in (Outcome.ABSTAIN, Outcome.NOT_SAMPLED)


def _is_failure(score: Score) -> bool:
    return score.is_failure
