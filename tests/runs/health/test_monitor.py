from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from toy_rollouts import completion, failed, fit, outputs, rollouts, train_batch

from lit_grpo.callbacks import HealthMonitor
from lit_grpo.types import Outcome

HEALTHY = outputs(rollouts([[0.0, 1.0]]), train_batch([-1.0, 1.0]))


@pytest.fixture
def warnings_of(caplog):
    def run(*steps, repeat_every=50):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="lit_grpo"):
            callback = HealthMonitor(repeat_every=repeat_every)
            fit(lambda step: steps[step], [callback], steps=len(steps))
        return [record.getMessage() for record in caplog.records]

    return run


def test_a_healthy_step_has_no_warning(warnings_of):
    assert warnings_of(HEALTHY) == []


def test_equal_rewards_warn_that_all_advantages_are_zero(warnings_of):
    step = outputs(rollouts([[0.75, 0.75]]), train_batch([0.0, 0.0]))
    (message,) = warnings_of(step)
    assert message.startswith("rollout step 1: All advantages are 0")
    assert "their mean is 0.75" in message


def test_advantages_of_untrained_rows_are_ignored(warnings_of):
    step = outputs(rollouts([[0.5, 0.5]]), train_batch([5.0, 0.0], trained=[False, True]))
    (message,) = warnings_of(step)
    assert "All advantages are 0" in message


def test_an_advantage_of_0_on_what_filtering_leaves_says_so(warnings_of):
    """The filtered row is the better one, and the others are equal."""
    completions = [completion("a"), completion("b"), completion("c", "length")]
    batch = rollouts([[0.0, 0.0, 1.0]], completions)
    trained = train_batch([0.0, 0.0, 1.0], trained=[True, True, False])
    (message,) = warnings_of(outputs(batch, trained))
    assert "on the 2 rows that are left to train on; 1 others are filtered, 33%" in message
    assert "cancel out" not in message


def test_advantages_of_0_from_differing_rewards_point_at_the_function_that_made_them(warnings_of):
    (message,) = warnings_of(outputs(rollouts([[0.0, 1.0]]), train_batch([0.0, 0.0])))
    assert message.endswith("check model.advantage.function.")


def test_rewards_that_cancel_out_are_named(warnings_of):
    batch = rollouts([[0.5, 0.5]])
    parts = {"math": torch.tensor([[1.0, 0.0]]), "length": torch.tensor([[-1.0, 0.0]])}
    batch = replace(batch, parts=parts)
    (message,) = warnings_of(outputs(batch, train_batch([0.0, 0.0])))
    assert "'math' and 'length' differ inside groups" in message


def test_zero_logprobs_everywhere_point_at_the_engine(warnings_of):
    completions = [completion("a", logprob=0.0), completion("b", logprob=0.0)]
    step = outputs(rollouts([[0.0, 1.0]], completions), train_batch([-1.0, 1.0]))
    (message,) = warnings_of(step)
    assert "exactly 0" in message
    assert "greedily" in message


def test_logprobs_near_zero_say_that_the_policy_is_certain(warnings_of):
    completions = [completion("a", logprob=-0.001), completion("b", logprob=-0.002)]
    step = outputs(rollouts([[0.0, 1.0]], completions), train_batch([-1.0, 1.0]))
    (message,) = warnings_of(step)
    assert "the lowest is -0.002" in message


def test_many_small_token_logprobs_are_not_a_certain_sequence(warnings_of):
    completions = [completion("a" * 20, logprob=-0.001), completion("b" * 20, logprob=-0.001)]
    step = outputs(rollouts([[0.0, 1.0]], completions), train_batch([-1.0, 1.0]))
    assert warnings_of(step) == []


def test_identical_completions_of_half_the_groups_warn(warnings_of):
    texts = ["x", "x", "y", "z"]
    batch = rollouts([[0.0, 1.0]] * 2, [completion(text) for text in texts])
    (message,) = warnings_of(outputs(batch, train_batch([-1.0, 1.0] * 2)))
    assert "In 50% of the groups all 2 completions are identical" in message


def test_identical_completions_that_all_solve_their_prompt_do_not_warn(warnings_of):
    texts = ["x", "x", "y", "z"]
    batch = rollouts([[1.0, 1.0], [0.0, 1.0]], [completion(text) for text in texts])
    assert warnings_of(outputs(batch, train_batch([0.0, 0.0, -1.0, 1.0]))) == []


def test_the_same_text_in_two_groups_does_not_make_a_group_identical(warnings_of):
    batch = rollouts([[0.0, 1.0]] * 2, [completion(text) for text in "xyxy"])
    assert warnings_of(outputs(batch, train_batch([-1.0, 1.0] * 2))) == []


def test_truncated_completions_warn_above_one_half(warnings_of):
    def step(num_cut):
        completions = [completion(f"c{n}", "length" if n < num_cut else "stop") for n in range(4)]
        return outputs(rollouts([[0.0, 1.0] * 2], completions), train_batch([-1.0, 1.0] * 2))

    assert warnings_of(step(2)) == []
    (message,) = warnings_of(step(3))
    assert "75% of the completions were cut off" in message


def test_no_valid_row_names_the_failing_reward(warnings_of):
    down = failed(Outcome.ERROR, "401 wrong api key")
    (message,) = warnings_of(outputs(rollouts([[down, down]])))
    assert "No token contributes to the loss" in message
    assert "100% of the scores of reward 'math' ended as error" in message
    assert "401 wrong api key" in message


def test_groups_with_one_valid_row_are_distinguished_from_filtered_rows(warnings_of):
    (alone,) = warnings_of(outputs(rollouts([[1.0, None]])))
    assert "no group has two valid rows" in alone
    cut = [completion("a", "length"), completion("b", "stop")]
    filtered = train_batch([1.0, -1.0], trained=[False, False])
    (message,) = warnings_of(outputs(rollouts([[1.0, 0.0]], cut), filtered))
    assert "filtered" in message
    assert "50% of the completions" in message


def test_a_warning_repeats_at_every_nth_such_step(warnings_of):
    flat = outputs(rollouts([[0.5, 0.5]]), train_batch([0.0, 0.0]))
    messages = warnings_of(flat, HEALTHY, flat, flat, flat, repeat_every=2)
    starts = [message.split(":")[0] for message in messages]
    assert starts == [
        "rollout step 1",
        "rollout step 3 (2 steps so far)",
        "rollout step 5 (4 steps so far)",
    ]


def test_a_module_without_rollouts_gets_no_warning(warnings_of):
    assert warnings_of({}, {}) == []
