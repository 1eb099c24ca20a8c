import pytest
import torch
from small_runs import fit, make_module
from tiny import completion, prompt, rollouts, train_batch

from lit_grpo.callbacks import HealthMonitor
from lit_grpo.diagnostics.step_findings import truncated_fraction
from lit_grpo.objective.advantages import has_signal
from lit_grpo.objective.loss import TokenLosses
from lit_grpo.rewards import Reward
from lit_grpo.rewards.scoring.suite import RewardSuite
from lit_grpo.training import metrics as metrics_module
from lit_grpo.training.batching import trained_rows
from lit_grpo.training.metrics import (
    Metrics,
    add_advantage_metrics,
    add_rollout_metrics,
    add_update_metrics,
)
from lit_grpo.types import Completion


def test_means_extremes_totals_and_percentiles_of_the_values_that_were_added():
    metrics = Metrics()
    metrics.add("a", 6.0, 3)
    metrics.add("a", torch.tensor(4.0), 1)
    metrics.add_all("b", [1.0, 2.0])
    for value in (3.0, torch.tensor(5.0), 4.0):
        metrics.maximum("high", value)
        metrics.minimum("low", value)
    metrics.total("sum", 2.0)
    metrics.total("sum", 0.5)
    metrics.percentile("p50", [1.0, 9.0], 50)
    metrics.percentile("p50", [2.0], 50)
    assert metrics.merged() == {"a": 2.5, "b": 1.5, "high": 5.0, "low": 3.0, "sum": 2.5, "p50": 2.0}
    assert metrics.merged()["a"] == 2.5  # merging changes nothing


def test_values_are_merged_over_ranks_that_have_different_names(monkeypatch):
    other = Metrics()
    other.add_all("a", [4.0, 6.0])
    other.maximum("high", 7.0)
    other.minimum("low", 1.0)
    other.total("sum", 3.0)
    other.percentile("p50", [5.0, 9.0], 50)
    monkeypatch.setattr(metrics_module, "gather_objects", lambda own: [own, other])
    metrics = Metrics()
    metrics.add("a", torch.tensor(2.0))
    metrics.maximum("high", torch.tensor(8.0))
    metrics.total("sum", 1.0)
    metrics.percentile("p50", [1.0], 50)
    merged = {"a": 4.0, "high": 8.0, "low": 1.0, "sum": 4.0, "p50": 5.0}
    assert metrics.merged() == merged


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
    assert values["reward/std"] == pytest.approx(0.5**0.5 / 2)  # of groups with two valid rows
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


def scored_by_length(*groups):
    class Length(Reward):
        def score(self, prompt, completion):
            return float(len(completion.token_ids))

    prompts = [prompt(id=str(number)) for number in range(len(groups))]
    with RewardSuite([Length()]) as suite:
        return suite.score(prompts, groups)


FAILED = Completion.failed("400: the prompt is too long")


def test_completions_that_could_not_be_sampled_have_no_length_and_are_not_truncated():
    cut_off = completion([1, 2, 3, 4], finish_reason="length")
    batch = scored_by_length([completion([1, 2]), FAILED, cut_off, FAILED])
    metrics = Metrics()
    add_rollout_metrics(metrics, batch)
    values = metrics.merged()
    assert values["rollout/failed_fraction"] == 0.5
    assert values["completions/mean_length"] == 3
    assert values["completions/min_length"] == 2
    assert values["completions/truncated_fraction"] == truncated_fraction(batch) == 0.5
    assert values["sampler/entropy"] == 1.0
    assert values["reward/length/not_sampled_fraction"] == 0.5


def test_a_step_without_any_completion_has_no_lengths():
    metrics = Metrics()
    add_rollout_metrics(metrics, scored_by_length([FAILED, FAILED]))
    values = metrics.merged()
    assert values["rollout/failed_fraction"] == 1
    assert "completions/mean_length" not in values
    assert "reward/mean" not in values


@pytest.mark.parametrize(
    ("difference", "is_signal"),
    [(1e-12, False), (6e-8, False), (1e-6, True)],
    ids=["rounding", "rounding to float32", "tiny"],
)
def test_metrics_warnings_and_dynamic_sampling_agree_on_which_groups_have_a_signal(
    difference, is_signal, caplog
):
    class AlmostEqual(Reward):
        def score_group(self, prompt, completions):
            return [0.3 * (1 + difference * place) for place in range(len(completions))]

    module = make_module(rewards=[AlmostEqual()], dynamic_sampling_rounds=1)
    (output,) = fit(module, callbacks=[HealthMonitor()])
    batch, values = output["rollouts"], output["metrics"]
    # The rows count and are trained on in any case; whether they have a signal is another question.
    assert batch.counted.all()
    assert trained_rows(batch, overlong_filtering=False).all()
    assert has_signal(batch.rewards, batch.valid).tolist() == [is_signal] * 4
    assert output["batch"].advantages.any() == is_signal
    assert values["reward/frac_zero_std"] == (0 if is_signal else 1)
    assert (values["reward/std"] > 0) == is_signal
    assert values["dynamic_sampling/unfilled_fraction"] == (0 if is_signal else 1)
    assert ("All advantages are 0" in caplog.text) == (not is_signal)


def test_advantage_metrics_are_those_of_trained_rows():
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
    batch = train_batch(rollouts([[0, 1]], [[completion([1]), completion([1, 2])]]))
    plain = torch.tensor([[1.0, 50.0], [2.0, 3.0]])  # the 50 is on padding
    losses = TokenLosses(
        loss=plain.sum(),
        surrogate=plain,
        kl=plain,
        distillation_kl=plain,
        ratio=plain,
        clipped_low=plain > 100,
        clipped_high=plain > 1,
        has_surrogate=plain != 3,
        sampler_log_ratio=plain,
        weights=plain,
        own_metrics={"own": plain * 10},
    )
    metrics = Metrics()
    add_update_metrics(metrics, batch, losses, plain)
    values = metrics.merged()
    assert values["policy/kl"] == values["policy/entropy"] == values["policy/ratio_mean"] == 2.0
    assert values["own/own"] == 20.0
    assert values["policy/clip_low_fraction"] == 0
    assert values["policy/masked_fraction"] == pytest.approx(1 / 3)
    assert values["policy/clip_high_fraction"] == pytest.approx(2 / 3)
    assert values["sampler/logprob_difference_mean"] == pytest.approx(2.0)
    assert values["sampler/logprob_difference_max"] == pytest.approx(3.0)
