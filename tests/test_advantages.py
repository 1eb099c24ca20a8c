import math

import pytest
import torch
from tiny import rollouts

from lit_grpo.advantages import AdvantageConfig, center, compute_advantages, group_deviation


def advantages(rewards, *, weights=None, parts=None, **config):
    batch = rollouts(rewards, parts=parts)
    return compute_advantages(batch, weights or {"task": 1.0}, AdvantageConfig(**config)).tolist()


def test_group_deviation_divides_the_centred_rewards_of_each_group():
    # Group 1: mean 2, deviation 1. Group 2: mean 0.5, deviation sqrt(1/3).
    result = advantages([[1, 2, 3], [0, 0.5, 1]])
    assert result[0] == pytest.approx([-1 / 1.0001, 0, 1 / 1.0001])
    assert result[1] == pytest.approx([-0.5 / 0.5001, 0, 0.5 / 0.5001])


def test_no_deviation_leaves_the_centred_rewards():
    assert advantages([[0, 0, 0, 1]], deviation="none") == [[-0.25, -0.25, -0.25, 0.75]]


def test_batch_deviation_is_that_of_all_centred_rewards():
    # Centred: -1 1 -3 3; sum of squares 20 over 4 - 1.
    deviation = math.sqrt(20 / 3) + 1e-4
    result = advantages([[0, 2], [0, 6]], deviation="batch")
    assert result[0] == pytest.approx([-1 / deviation, 1 / deviation])
    assert result[1] == pytest.approx([-3 / deviation, 3 / deviation])


def test_a_row_that_could_not_be_scored_has_no_vote_and_no_advantage():
    assert advantages([[0, 1, None, 2]], deviation="none") == [[-1, 0, 0, 1]]


@pytest.mark.parametrize("deviation", ["group", "batch", "none"])
def test_a_group_with_one_valid_row_has_no_advantage(deviation):
    assert advantages([[5, None, None], [1, 1, 1]], deviation=deviation) == [[0] * 3] * 2


@pytest.mark.parametrize("deviation", ["group", "batch", "none"])
def test_equal_rewards_give_exactly_zero_where_floating_point_makes_noise(deviation):
    # The mean of 0.1 six times is not 0.1, and 1e8 + 0.1 loses digits.
    result = advantages([[0.1] * 6, [0.7] * 6, [1e8 + 0.1] * 6], deviation=deviation)
    assert result == [[0.0] * 6] * 3


def test_large_and_close_rewards_keep_their_deviation():
    # E[x^2] - E[x]^2 in float64 is 0 or worse here.
    rewards = torch.tensor([[1e9, 1e9 + 3, 1e9 + 6]], dtype=torch.float64)
    valid = torch.ones_like(rewards, dtype=torch.bool)
    assert group_deviation(rewards, valid).item() == pytest.approx(3.0)
    assert center(rewards, valid).tolist() == [[-3, 0, 3]]


def test_normalise_then_sum_lets_a_reward_with_small_numbers_be_heard():
    parts = {"large": [[0.0, 100.0]], "small": [[0.01, 0.0]]}
    summed = [[0.01, 100.0]]
    weights = {"large": 1.0, "small": 2.0}
    plain = advantages(summed, parts=parts, weights=weights)
    assert plain[0][0] < -0.7
    # Each part alone is -+ 1/sqrt(2): large -0.7071 + 2 * small 0.7071 * (deviation / floor).
    large = 50 / (math.sqrt(5000) + 1e-4)
    small = 0.005 / (math.sqrt(0.00005) + 1e-4)
    each = advantages(summed, parts=parts, weights=weights, combine="normalise_then_sum")
    assert each[0] == pytest.approx([-large + 2 * small, large - 2 * small])


def test_normalise_then_sum_leaves_out_a_reward_that_does_not_apply():
    parts = {"a": [[0.0, 1.0]], "b": [[None, None]]}
    result = advantages(
        [[0, 1]],
        parts=parts,
        weights={"a": 1, "b": 1},
        combine="normalise_then_sum",
        deviation="none",
    )
    assert result == [[-0.5, 0.5]]
