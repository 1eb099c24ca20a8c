import logging

import pytest
import torch

from lit_grpo.stopping import ExitCode
from lit_grpo.training.optimizer.skipped_steps import SkippedSteps

NAN = torch.tensor(float("nan"))


def test_only_steps_in_a_row_reach_the_limit():
    steps = SkippedSteps(len, 3)
    for place in ("rollout step 1", "rollout step 2"):
        steps.count(place, NAN)
    steps.count_taken()
    for place in ("rollout step 4", "rollout step 5"):
        steps.count(place, NAN)
    assert (steps.in_a_row, steps.num_at_limit) == (2, 0)
    steps.count("rollout step 6", NAN)
    assert steps.num_at_limit == 3
    reason = steps.stop_reason()
    assert (reason.exit_code, reason.cause) == (ExitCode.DIVERGED, "not_finite_gradient")
    assert reason.message.startswith("Stopped because the gradients of 3 optimizer steps in a row")


@pytest.mark.parametrize(("saved", "expected"), [(0, 0), (2, 2), (3, 0), (5, 2)])
def test_a_resumed_run_that_was_stopped_at_the_limit_gets_as_many_again(saved, expected):
    steps = SkippedSteps(len, 3)
    steps.load(saved)
    assert steps.in_a_row == expected


def test_single_ones_are_logged_ever_more_rarely(caplog):
    told = []
    steps = SkippedSteps(told.append, 3, setting="the.key", advice="Look there. ")
    with caplog.at_level(logging.WARNING):
        for number in range(1, 10):
            steps.count(f"rollout step {number}", NAN)
            steps.count_taken()
    assert [one.getMessage().split("step ")[1].split()[0] for one in caplog.records] == [
        *("1", "2", "4", "8")
    ]
    assert caplog.messages[0] == (
        "the gradient of rollout step 1 is not finite (norm nan), so the optimizer step is "
        "skipped: 1 in a row, of at most 3 (the.key). Look there."
    )
    assert told == caplog.messages
    steps.forget()
    steps.count("rollout step 10", NAN)
    assert "rollout step 10 " in caplog.messages[-1]
