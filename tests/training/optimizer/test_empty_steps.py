"""Rollout steps without an optimizer step, one by one and in whole runs."""

import logging

import pytest
from small_runs import fit, make_module

from lit_grpo.rewards import Reward
from lit_grpo.stopping import ExitCode, get_stop_reason
from lit_grpo.training.optimizer.empty_steps import MAX_EMPTY_STEPS, EmptySteps


def test_so_many_steps_in_a_row_end_a_run_with_the_reason_of_the_last():
    steps = EmptySteps()
    assert [steps.count(number) for number in range(1, MAX_EMPTY_STEPS)] == [None] * 49
    reason = steps.count(MAX_EMPTY_STEPS, "a callback skipped the update.", "collapse")
    assert (reason.exit_code, reason.cause) == (ExitCode.NO_REWARD, "collapse")
    assert reason.message == (
        "Stopped because 50 rollout steps in a row took no optimizer step: a callback skipped the "
        "update."
    )


def test_a_step_that_is_trained_on_begins_a_new_row():
    steps = EmptySteps()
    for number in range(1, MAX_EMPTY_STEPS):
        steps.count(number)
    steps.reset()
    assert steps.count(MAX_EMPTY_STEPS) is None
    assert steps.in_a_row == 1


def test_steps_in_a_row_are_logged_ever_more_rarely(caplog):
    steps = EmptySteps()
    with caplog.at_level(logging.WARNING):
        for number in range(11, 20):
            steps.count(number)
    assert [one.partition(":")[0] for one in caplog.messages] == [
        "rollout step 11 takes no optimizer step (1 in a row)",
        "rollout step 12 takes no optimizer step (2 in a row)",
        "rollout step 14 takes no optimizer step (4 in a row)",
        "rollout step 18 takes no optimizer step (8 in a row)",
    ]
    assert "no token to train on" in caplog.messages[0]


@pytest.mark.parametrize(("saved", "expected"), [(0, 0), (3, 3), (MAX_EMPTY_STEPS, 0)])
def test_a_resumed_run_that_was_stopped_at_the_limit_gets_as_many_again(saved, expected):
    steps = EmptySteps()
    steps.load(saved)
    assert steps.in_a_row == expected


@pytest.mark.slow
def test_a_run_without_anything_to_train_on_ends_although_max_steps_is_far(caplog):
    class Abstains(Reward):
        def score(self, prompt, completion):
            return None

    module = make_module(rewards=[Abstains()])
    outputs = fit(module, max_steps=1, max_epochs=-1)
    assert len(outputs) == MAX_EMPTY_STEPS
    assert module.global_step == 0
    reason = get_stop_reason(module.trainer)
    *lines, last = (one for one in caplog.messages if "no token to train on" in one)
    assert len(lines) == MAX_EMPTY_STEPS.bit_length()
    assert last == reason.message  # Lightning's own trainer does not say why it ends
    assert reason.exit_code == ExitCode.NO_REWARD
    assert f"{MAX_EMPTY_STEPS} rollout steps in a row" in reason.message


def test_steps_without_anything_to_train_on_are_counted_over_a_resume(tmp_path, monkeypatch):
    monkeypatch.setattr("lit_grpo.training.optimizer.empty_steps.MAX_EMPTY_STEPS", 5)

    class Abstains(Reward):
        def score(self, prompt, completion):
            return None

    def train(*, ckpt_path=None, **limits):
        module = make_module(rewards=[Abstains()])
        outputs = fit(module, max_steps=1, ckpt_path=ckpt_path, **limits)
        module.trainer.save_checkpoint(tmp_path / "last.ckpt")
        return len(outputs), get_stop_reason(module.trainer)

    assert train(max_epochs=3) == (3, None)
    num_steps, reason = train(max_epochs=-1, ckpt_path=tmp_path / "last.ckpt")
    assert (num_steps, reason.exit_code) == (2, ExitCode.NO_REWARD)
    assert "5 rollout steps in a row" in reason.message
    num_steps, _ = train(max_epochs=-1, ckpt_path=tmp_path / "last.ckpt")
    assert num_steps == 5  # as many again
