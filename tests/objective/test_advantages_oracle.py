"""Advantages against TRL's formulas, computed with its own NaN-aware deviation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_batches import (
    assert_same,
    double_precision,  # noqa: F401 - a fixture
)
from torch import Tensor

from lit_grpo.objective import AdvantageConfig
from lit_grpo.objective.advantages import compute_advantages
from lit_grpo.types import RewardTable

GROUP_SIZE = 4
WEIGHTS = {"a": 1.0, "b": 0.3, "c": -2.0}

deterministic = settings(derandomize=True, database=None, max_examples=60)
# Values of 16 bits never differ by a rounding error only.
floats = st.floats(-3, 3, width=16, allow_subnormal=False)
values = st.none() | st.sampled_from([0.0, 1.0, 0.5]) | floats
rows = st.tuples(*[values] * len(WEIGHTS))
batches = st.lists(st.lists(rows, min_size=GROUP_SIZE, max_size=GROUP_SIZE), min_size=1, max_size=4)


def scored(group: list[tuple[float | None, ...]]) -> int:
    return sum(any(value is not None for value in row) for row in group)


def nanstd(tensor: Tensor, dim: int | None = None) -> Tensor:
    reason = "TRL comes with the dev extra"
    return pytest.importorskip("trl.trainer.utils", reason=reason).nanstd(
        tensor, dim=dim, keepdim=dim is not None
    )


def parts_of(batch: list[list[tuple[float | None, ...]]]) -> Tensor:
    """Return [B, G, K], NaN where a reward has no value."""
    nan = float("nan")
    filled = [[[nan if v is None else v for v in row] for row in group] for group in batch]
    return torch.tensor(filled, dtype=torch.float64)


def weighted_sum(parts: Tensor) -> Tensor:
    """Return [B, G], NaN where no reward has a value."""
    total = (parts * torch.tensor(list(WEIGHTS.values()), dtype=torch.float64)).nansum(-1)
    return total.where(~parts.isnan().all(-1), torch.nan)


def without_floor(deviation: Tensor) -> Tensor:
    """TRL adds 1e-4 to a deviation, which shrinks rewards on a small scale; we add nothing."""
    return torch.where(deviation > 1e-12, deviation, 1.0)


def trl_sum_then_normalize(parts: Tensor, scale_rewards: str) -> Tensor:
    rewards = weighted_sum(parts)
    deviation = nanstd(rewards) if scale_rewards == "batch" else nanstd(rewards, 1)
    advantages = rewards - rewards.nanmean(1, keepdim=True)
    if scale_rewards != "none":
        advantages = advantages / without_floor(deviation)
    return advantages.nan_to_num(0.0)


def trl_normalize_then_sum(parts: Tensor) -> Tensor:
    normalised = (parts - parts.nanmean(1, keepdim=True)) / without_floor(nanstd(parts, 1))
    unscored = parts.isnan().all(-1)
    weights = torch.tensor(list(WEIGHTS.values()), dtype=torch.float64)
    total = (normalised * weights).nansum(-1).masked_fill(unscored, torch.nan)
    return ((total - total.nanmean()) / without_floor(nanstd(total))).nan_to_num(0.0)


def ours(parts: Tensor, **config: object) -> Tensor:
    rewards = weighted_sum(parts)
    table = RewardTable(
        rewards=rewards,
        parts={name: parts[:, :, i] for i, name in enumerate(WEIGHTS)},
        weights=WEIGHTS,
        valid=~rewards.isnan(),
        lengths=torch.ones_like(rewards),
    )
    return compute_advantages(table, AdvantageConfig(**config))


# In TRL, a row alone in its group counts in the deviation of the batch; here it does not.
without_lone_rows = batches.filter(lambda batch: all(scored(group) != 1 for group in batch))


@pytest.mark.parametrize("deviation", ["group", "batch", "none"])
def test_weighted_sums_with_missing_rewards_are_normalised_as_in_trl(deviation):
    @deterministic
    @given(without_lone_rows)
    def check(batch):
        parts = parts_of(batch)
        assert_same([ours(parts, deviation=deviation)], [trl_sum_then_normalize(parts, deviation)])

    check()


def test_normalise_then_sum_with_rescale_is_normalize_then_sum_of_trl():
    @deterministic
    @given(without_lone_rows)
    def check(batch):
        parts = parts_of(batch)
        advantages = ours(parts, combine="normalise_then_sum", rescale=True)
        assert_same([advantages], [trl_normalize_then_sum(parts)])

    check()


def test_a_row_alone_in_its_group_counts_in_the_batch_deviation_of_trl_only():
    batch = [[(1.0,) * 3, (0.0,) * 3, (0.0,) * 3, (1.0,) * 3], [(50.0,) * 3] + [(None,) * 3] * 3]
    parts = parts_of(batch)
    without = parts[:1]
    assert_same(ours(parts, deviation="batch")[:1], ours(without, deviation="batch"))
    assert_same(ours(without, deviation="batch"), trl_sum_then_normalize(without, "batch"))
    trl = trl_sum_then_normalize(parts, "batch")[0].abs().max()
    assert trl < 0.05 * ours(parts, deviation="batch").abs().max()
