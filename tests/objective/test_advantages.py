"""Advantages against hand-computed values; which rows count; rounding errors and offsets."""

import math
import statistics
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiny import as_tensor, rollouts

from lit_grpo.objective import AdvantageConfig
from lit_grpo.objective.advantages import (
    center,
    center_over_batch,
    compute_advantages,
    group_deviation,
    has_signal,
)


def advantages(rewards, *, weights=None, parts=None, **config):
    batch = rollouts(rewards, parts=parts)
    table = batch.reward_table(weights or {"task": 1.0})
    return compute_advantages(table, AdvantageConfig(**config)).tolist()


def test_group_deviation_divides_the_centred_rewards_of_each_group():
    # Group 1: mean 2, deviation 1. Group 2: mean 0.5, deviation 0.5.
    result = advantages([[1, 2, 3], [0, 0.5, 1]])
    assert result[0] == pytest.approx([-1, 0, 1])
    assert result[1] == pytest.approx([-0.5 / 0.5, 0, 0.5 / 0.5])


def test_no_deviation_leaves_the_centred_rewards():
    assert advantages([[0, 0, 0, 1]], deviation="none") == [[-0.25, -0.25, -0.25, 0.75]]


def test_batch_deviation_is_that_of_all_rewards():
    # Rewards 0 2 0 6: mean 2, squares 4 0 4 16 over 4 - 1. Their groups' means do not matter.
    deviation = math.sqrt(24 / 3)
    result = advantages([[0, 2], [0, 6]], deviation="batch")
    assert result[0] == pytest.approx([-1 / deviation, 1 / deviation])
    assert result[1] == pytest.approx([-3 / deviation, 3 / deviation])


def test_leave_one_out_subtracts_the_mean_of_the_others():
    rewards = [1.0, 4.0, None, -2.0, 0.5]
    scored = [reward for reward in rewards if reward is not None]
    expected = [
        0.0 if reward is None else reward - (sum(scored) - reward) / (len(scored) - 1)
        for reward in rewards
    ]
    result = advantages([rewards], baseline="leave_one_out", deviation="none")
    assert result[0] == pytest.approx(expected)


def test_leave_one_out_is_n_over_n_minus_one_times_the_group_baseline():
    rewards = [[0, 0, 1, None], [2, 5, 3, 4]]
    group = torch.tensor(advantages(rewards, deviation="none"))
    others = torch.tensor(advantages(rewards, baseline="leave_one_out", deviation="none"))
    torch.testing.assert_close(others, group * torch.tensor([[3 / 2], [4 / 3]]))


def test_batch_baseline_gives_a_group_of_equal_rewards_an_advantage():
    # REINFORCE++: mean 2 of 1 1 4, deviation sqrt(3).
    rewards = [[1, 1, 4, None], [None, None, None, 9]]
    plain = advantages(rewards, baseline="batch", deviation="none")
    assert plain == [[-1, -1, 2, 0], [0, 0, 0, 0]]
    scale = math.sqrt(3)
    whitened = advantages([[1, 1], [4, None], [4, 2]], baseline="batch", deviation="batch")
    assert whitened[0] == pytest.approx([-1 / math.sqrt(2)] * 2)
    assert advantages(rewards, baseline="batch", deviation="batch")[0] == pytest.approx(
        [-1 / scale, -1 / scale, 2 / scale, 0]
    )


def test_deviation_mean_divides_by_the_share_of_successes():
    # MaxRL: one of four and three of four right, and none of four.
    result = advantages([[1, 0, 0, 0], [1, 1, 0, 1], [0, 0, 0, 0]], deviation="mean")
    assert result[0] == pytest.approx([3, -1, -1, -1])
    assert result[1] == pytest.approx([1 / 3, 1 / 3, -1, 1 / 3])
    assert result[2] == [0, 0, 0, 0]


def test_deviation_mean_refuses_a_negative_reward():
    with pytest.raises(ValueError, match=r"got -0\.5.* Set model\.advantage\.deviation"):
        advantages([[1, -0.5]], deviation="mean")


@pytest.mark.parametrize("deviation", ["group", "mean"])
def test_batch_baseline_refuses_a_deviation_of_the_group(deviation):
    with pytest.raises(ValueError, match=r"Set model\.advantage\.deviation"):
        AdvantageConfig(baseline="batch", deviation=deviation)


def test_rescale_divides_by_the_deviation_of_the_advantages():
    # Centred -1 1 -3 3: squares 20 over 4 - 1.
    deviation = math.sqrt(20 / 3)
    result = advantages([[0, 2], [0, 6]], deviation="none", rescale=True)
    assert result[0] == pytest.approx([-1 / deviation, 1 / deviation])
    assert result[1] == pytest.approx([-3 / deviation, 3 / deviation])


def test_normalise_then_sum_keeps_the_influence_of_a_reward_on_a_small_scale():
    parts = {"large": [[0.0, 100.0]], "small": [[0.01, 0.0]]}
    summed = [[0.01, 100.0]]
    weights = {"large": 1.0, "small": 2.0}
    assert advantages(summed, parts=parts, weights=weights)[0][0] < -0.7
    # Each part alone gives +-1 / sqrt(2), apart from the floor added to its deviation.
    large = 50 / math.sqrt(5000)
    small = 0.005 / math.sqrt(0.00005)
    both = -large + 2 * small
    gdpo = {"combine": "normalise_then_sum", "parts": parts, "weights": weights}
    assert advantages(summed, **gdpo)[0] == pytest.approx([both, -both])
    scale = math.sqrt(2) * both
    rescaled = advantages(summed, rescale=True, **gdpo)
    assert rescaled[0] == pytest.approx([both / scale, -both / scale])


def test_normalise_then_sum_uses_each_reward_only_where_it_has_a_value():
    result = advantages(
        [[0, 1, 5]],
        parts={"a": [[0.0, 1.0, 5.0]], "b": [[None, 2.0, 4.0]], "c": [[None] * 3]},
        weights={"a": 1, "b": 10, "c": 1},
        combine="normalise_then_sum",
        deviation="none",
    )
    assert result == [[-2, -1 - 10, 3 + 10]]


def test_normalise_then_sum_ignores_a_reward_of_weight_zero():
    result = advantages(
        [[0, 1]],
        parts={"a": [[0.0, 1.0]], "logged": [[-9.0, 0.0]]},  # -9 would be refused
        weights={"a": 1, "logged": 0},
        combine="normalise_then_sum",
        deviation="mean",
    )
    assert result == [[-1, 1]]


CONFIGS = [
    {"baseline": baseline, "deviation": deviation, "rescale": rescale}
    for baseline in ("group", "leave_one_out", "batch")
    for deviation in ("group", "batch", "mean", "none")
    for rescale in (False, True)
    if baseline != "batch" or deviation in ("batch", "none")
]
OF_GROUPS = [config for config in CONFIGS if config["baseline"] != "batch"]
SHIFTED = [config for config in CONFIGS if config["deviation"] != "mean"]

every_config = pytest.mark.parametrize("config", CONFIGS)


@every_config
def test_a_row_that_could_not_be_scored_does_not_count_and_has_exactly_no_advantage(config):
    with_failures = advantages([[0, None, 1, 2], [None, 5, 3, 3]], **config)
    assert [with_failures[0][1], with_failures[1][0]] == [0, 0]
    assert [v for row in with_failures for v in row if v != 0] == pytest.approx(
        [v for row in advantages([[0, 1, 2], [5, 3, 3]], **config) for v in row if v != 0]
    )


@every_config
def test_a_row_alone_in_its_group_does_not_count_and_has_exactly_no_advantage(config):
    group = [0.0, 1.0, 1.0]
    alone = advantages([[5, None, None], group], **config)
    assert alone == [[0, 0, 0], pytest.approx(advantages([group], **config)[0])]


@every_config
@pytest.mark.parametrize("combine", ["sum_then_normalise", "normalise_then_sum"])
def test_a_batch_without_counted_rows_has_no_advantages(config, combine):
    nothing = [[None, None, None], [1.0, None, None]]
    assert advantages(nothing, combine=combine, **config) == [[0] * 3] * 2


EQUAL = {
    "tenths": [0.1] * 6,
    "sums": [0.1 + 0.2, 0.3, 0.15 + 0.15, 0.3, 0.1 + 0.1 + 0.1, 0.3],
    "thirds": [1 / 3, 1 - 2 / 3, 1 / 3, 2 / 3 - 1 / 3, 0.1 / 0.3, 1 / 3],
    "large": [1e8 + 0.1] * 6,
    "huge": [1e300 / 3] * 6,
    "large and tiny": [1e8, 1e8 + 1e-8, 1e8, 1e8 + 2e-8, 1e8, 1e8 - 1e-8],
    "float32": [float(np.float32(0.1) + np.float32(0.2)), *[float(np.float32(0.3))] * 5],
    "numpy and Python": [float(np.float32(0.3)), *[0.3] * 5],
    "torch and Python": [torch.tensor(0.7).item(), *[0.7] * 5],
    "halves in float32": [*[float(np.float32(1000.1))] * 3, *[1000.1] * 3],
    "tiny": [1e-300 / 3] * 6,
    "zeros": [0.0, -0.0, 0.0, 0.0, -0.0, 0.0],
}


NOTHING = dict.fromkeys(EQUAL, [0.0] * 6)


@pytest.mark.parametrize("config", OF_GROUPS)
@pytest.mark.parametrize("combine", ["sum_then_normalise", "normalise_then_sum"])
def test_rewards_that_differ_by_rounding_errors_give_exactly_zero(config, combine):
    config = config | {"combine": combine}
    mixed = [0, 1, 0, 1, 1, 0]
    assert {name: advantages([EQUAL[name]], **config)[0] for name in EQUAL} == NOTHING
    assert {name: advantages([EQUAL[name], mixed], **config)[0] for name in EQUAL} == NOTHING


@pytest.mark.parametrize("deviation", ["batch", "none"])
def test_a_batch_of_equal_rewards_gives_exactly_zero_under_the_batch_baseline(deviation):
    config = {"baseline": "batch", "deviation": deviation, "rescale": True}
    halves = {name: advantages([equal[:3], equal[3:]], **config) for name, equal in EQUAL.items()}
    assert {name: first + second for name, (first, second) in halves.items()} == NOTHING


@pytest.mark.parametrize("scale", [1.0, 1000.0, 1e-6])
def test_a_difference_of_a_millionth_is_not_a_rounding_error(scale):
    rewards = [[scale, 1.000001 * scale]]
    assert advantages(rewards, deviation="none")[0][1] == pytest.approx(5e-7 * scale)
    assert advantages(rewards, baseline="leave_one_out")[0] != [0, 0]


def test_two_rewards_of_different_precision_that_cancel_each_other_leave_no_advantage():
    single = np.float32([0.1, 0.2, 0.7])
    parts = {"a": [single.tolist()], "b": [[-0.1, -0.2, -0.7]]}
    config = {"combine": "normalise_then_sum", "rescale": True}
    found = advantages([[0.0, 0.0, 0.0]], parts=parts, weights={"a": 1.0, "b": 1.0}, **config)
    assert found == [[0.0, 0.0, 0.0]]


integers = st.integers(-(2**20), 2**20)
offsets = st.sampled_from([0, 10**6, -(10**6), 10**6 + 1])
groups = st.lists(integers, min_size=2, max_size=8)

deterministic = settings(derandomize=True, database=None, max_examples=100)


@deterministic
@given(groups, offsets)
def test_mean_and_deviation_are_exact_far_from_zero(values, offset):
    rewards = [Fraction(value, 2**16) + offset for value in values]
    tensor = as_tensor([[float(reward) for reward in rewards]])
    valid = torch.ones_like(tensor).bool()
    mean = statistics.mean(rewards)
    expected = [float(reward - mean) for reward in rewards]
    assume(max(map(abs, expected)) > 1)  # less may be a rounding error
    assert center(tensor, valid)[0].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert group_deviation(tensor, valid).item() == pytest.approx(
        float(statistics.stdev(rewards)), rel=1e-7
    )


@pytest.mark.parametrize("config", SHIFTED)
@pytest.mark.parametrize("offset", [1.0, -3.0, 1e5])
def test_a_constant_on_every_reward_changes_nothing(config, offset):
    rewards = [[0.0, 1.0, None, 1.0], [2.0, 0.25, 0.5, 0.0]]
    shifted = [[None if r is None else r + offset for r in row] for row in rewards]
    for row, moved in zip(
        advantages(rewards, **config), advantages(shifted, **config), strict=True
    ):
        assert moved == pytest.approx(row, abs=1e-6)


@every_config
def test_order_within_groups_and_of_groups_changes_nothing(config):
    rewards = as_tensor([[0.0, 1.0, None, 0.7], [2.0, 0.25, 0.5, 0.1], [0.0, 0.0, 1.0, None]])
    within = torch.tensor([2, 0, 3, 1])
    groups = torch.tensor([1, 2, 0])

    def of(tensor):
        rows = [[None if math.isnan(r) else r for r in row] for row in tensor.tolist()]
        return torch.tensor(advantages(rows, **config))

    torch.testing.assert_close(of(rewards[groups][:, within]), of(rewards)[groups][:, within])


def test_mean_over_the_batch_is_zero_under_every_baseline():
    rewards = as_tensor([[0.0, 1.0, None], [2.0, 5.0, 4.0], [7.0, None, None]])
    centred = center_over_batch(rewards, ~rewards.isnan())
    assert centred.sum().item() == pytest.approx(0, abs=1e-12)
    assert centred[0].tolist() == pytest.approx([-2.4, -1.4, 0])


def test_two_rewards_that_cancel_each_other_leave_no_advantage():
    parts = {"a": [[0.1, 0.2, 0.7]], "b": [[0.9, 0.8, 0.3]]}
    batch = rollouts([[1.0, 1.0, 1.0]], parts=parts)
    config = AdvantageConfig(combine="normalise_then_sum", rescale=True)
    table = batch.reward_table({"a": 1.0, "b": 1.0})
    assert compute_advantages(table, config).tolist() == [[0.0, 0.0, 0.0]]


def test_a_group_has_a_signal_if_its_counted_rewards_differ_by_more_than_rounding():
    rewards = as_tensor([[0, 1, None], [1, 1, None], [0, None, None], [0.3, 0.1 + 0.2, 0.3]])
    assert has_signal(rewards, ~rewards.isnan()).tolist() == [True, False, False, False]


def with_lengths(rewards, lengths, **config):
    """Return the advantages of completions with these numbers of tokens."""
    table = rollouts(rewards).reward_table({"task": 1.0})
    table = replace(table, lengths=torch.tensor(lengths, dtype=torch.float64))
    return compute_advantages(table, AdvantageConfig(**config))


def test_opo_weighs_the_rewards_of_a_group_by_the_lengths_of_its_completions():
    # Baseline (1 * 10 + 0 * 20 + 1 * 30) / 60 = 2/3.
    found = with_lengths([[1, 0, 1]], [[10, 20, 30]], baseline="length_weighted", deviation="none")
    assert found[0].tolist() == pytest.approx([1 / 3, -2 / 3, 1 / 3])


REINFORCE_PLUS_PLUS = {"baseline": "batch", "deviation": "batch"}


def test_by_tokens_every_token_of_the_batch_counts_once():
    """As if every completion stood in the batch as often as it has tokens."""
    rewards, lengths = [[1.0, 0.0], [0.5, 2.0]], [[3, 5], [2, 7]]
    tokens = [
        reward
        for group, of_group in zip(rewards, lengths, strict=True)
        for reward, length in zip(group, of_group, strict=True)
        for _ in range(length)
    ]
    mean, deviation = statistics.mean(tokens), statistics.stdev(tokens)
    found = with_lengths(rewards, lengths, batch_statistics="tokens", **REINFORCE_PLUS_PLUS)
    expected = [(reward - mean) / deviation for group in rewards for reward in group]
    assert found.flatten().tolist() == pytest.approx(expected, rel=1e-12)


def test_by_tokens_rescaled_advantages_have_mean_0_and_deviation_1_over_the_tokens():
    """REINFORCE++ with baseline, arXiv 2501.03262 equations 6 and 7."""
    rewards, lengths = [[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]], [[2, 6, 9], [1, 4, 3]]
    settings = {"deviation": "none", "rescale": True, "batch_statistics": "tokens"}
    found = with_lengths(rewards, lengths, **settings).flatten()
    tokens = found.repeat_interleave(torch.tensor(lengths).flatten())
    assert tokens.mean().item() == pytest.approx(0, abs=1e-12)
    assert tokens.std().item() == pytest.approx(1)
    differences = [reward - statistics.mean(group) for group in rewards for reward in group]
    spread = (found - found[0]).tolist()
    scale = spread[1] / (differences[1] - differences[0])
    assert spread == pytest.approx([(d - differences[0]) * scale for d in differences])


def test_longer_wrong_answers_move_the_baseline_by_tokens_and_not_by_rows():
    """Half of 256 answers are right, with 100 tokens; the wrong ones have 270."""
    rewards = [[1.0, 0.0] * 4] * 32
    lengths = [[100.0, 270.0] * 4] * 32
    by_tokens, by_rows = (
        with_lengths(rewards, lengths, batch_statistics=count, **REINFORCE_PLUS_PLUS)[0, :2]
        for count in ("tokens", "rows")
    )
    # Share of right tokens p = 100 / 370: (1 - p) and -p over the deviation sqrt(p (1 - p)).
    assert by_tokens.tolist() == pytest.approx([math.sqrt(2.7), -math.sqrt(1 / 2.7)], rel=1e-4)
    assert by_rows.tolist() == pytest.approx([1, -1], rel=1e-2)


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 1e6])
@pytest.mark.parametrize("deviation", ["group", "batch"])
def test_the_scale_of_a_reward_does_not_change_a_normalised_advantage(deviation, scale):
    rewards = [[1.0, 2.0, 4.0], [0.0, 3.0, 3.0]]
    scaled = [[scale * reward for reward in group] for group in rewards]
    expected = advantages(rewards, deviation=deviation)
    for found, same in zip(advantages(scaled, deviation=deviation), expected, strict=True):
        assert found == pytest.approx(same, rel=1e-9)
