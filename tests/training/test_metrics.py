import pytest
import torch
from tiny import completion, rollouts, train_batch

from lit_grpo.objective.loss import TokenLosses
from lit_grpo.training.metrics import (
    Metrics,
    add_advantage_metrics,
    add_rollout_metrics,
    add_update_metrics,
)


def test_means_maxima_and_minima_over_all_that_was_added():
    metrics = Metrics()
    metrics.add("a", 6.0, 3)
    metrics.add("a", torch.tensor(4.0), 1)
    metrics.add_all("b", [1.0, 2.0])
    for value in (3.0, torch.tensor(5.0), 4.0):
        metrics.maximum("high", value)
        metrics.minimum("low", value)
    assert metrics.merged() == {"a": 2.5, "b": 1.5, "high": 5.0, "low": 3.0}


def test_a_name_without_a_value_is_absent_and_never_zero():
    metrics = Metrics()
    metrics.add_all("empty", [])
    assert metrics.merged() == {}


def test_rollout_metrics_count_valid_rows_only():
    batch = rollouts(
        [[1, 0, None], [0.1, 0.1, 0.1], [None, None, 1]],
        [
            [completion([1]), completion([1, 2]), completion([1] * 5, finish_reason="length")],
            [completion([1])] * 3,
            [completion([1])] * 3,
        ],
    )
    metrics = Metrics()
    add_rollout_metrics(metrics, batch)
    values = metrics.merged()
    assert values["reward/mean"] == pytest.approx((1 + 0 + 0.3 + 1) / 6)
    assert values["reward/valid_fraction"] == pytest.approx(6 / 9)
    assert values["reward/std"] == pytest.approx(0.5**0.5 / 2)  # of the groups with two votes
    assert values["reward/frac_zero_std"] == 0.5
    assert values["reward/task/error_fraction"] == pytest.approx(3 / 9)
    assert values["reward/task/ok_fraction"] == pytest.approx(6 / 9)
    assert values["sampler/entropy"] == 1.0
    assert values["completions/max_length"] == 5
    assert values["completions/min_length"] == 1
    assert values["completions/mean_length"] == pytest.approx(14 / 9)
    assert values["completions/truncated_fraction"] == pytest.approx(1 / 9)


def test_without_a_valid_row_there_is_no_reward():
    metrics = Metrics()
    add_rollout_metrics(metrics, rollouts([[None, None]]))
    values = metrics.merged()
    assert "reward/mean" not in values
    assert values["reward/valid_fraction"] == 0


def test_advantage_metrics_are_of_trained_rows():
    metrics = Metrics()
    trained = torch.tensor([True, True, True, False])
    add_advantage_metrics(metrics, torch.tensor([0.0, 1.0, -2.0, 9.0]), trained)
    assert metrics.merged() == pytest.approx(
        {
            "advantage/abs_mean": 1.0,
            "advantage/zero_fraction": 1 / 3,
            "advantage/max": 1.0,
            "advantage/min": -2.0,
        }
    )


def test_update_metrics_are_means_over_the_tokens_of_the_loss():
    batch = rollouts([[0, 1]], [[completion([1]), completion([1, 2])]])
    batch = train_batch(batch)
    plain = torch.tensor([[1.0, 50.0], [2.0, 3.0]])  # 50 stands on padding
    losses = TokenLosses(
        loss=plain.sum(),
        surrogate=plain,
        kl=plain,
        ratio=plain,
        clipped_low=plain > 100,
        clipped_high=plain > 1,
        has_surrogate=plain != 3,
        sampler_log_ratio=plain,
        weights=plain,
    )
    metrics = Metrics()
    add_update_metrics(metrics, batch, losses, plain)
    values = metrics.merged()
    assert values["policy/kl"] == values["policy/entropy"] == values["policy/ratio_mean"] == 2.0
    assert values["policy/clip_low_fraction"] == 0
    assert values["policy/masked_fraction"] == pytest.approx(1 / 3)
    assert values["policy/clip_high_fraction"] == pytest.approx(2 / 3)
    assert values["sampler/logprob_difference_mean"] == pytest.approx(2.0)
    assert values["sampler/logprob_difference_max"] == pytest.approx(3.0)
