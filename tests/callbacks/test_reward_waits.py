import logging

import pytest
from toy_rollouts import fit, outputs, rollouts

from lit_grpo.callbacks.reward_waits import WAITS, describe_wait

CALLS = {"judge/calls": 40.0, "timing/judge_api_latency_s": 2.0}


def test_a_step_that_mostly_computes_has_no_bottleneck():
    waits = CALLS | {"timing/judge_wait_max_concurrency_s": 500.0}
    assert describe_wait(waits, exposed_seconds=4.9, step_seconds=10) is None


@pytest.mark.parametrize("cause", WAITS)
def test_the_setting_that_calls_waited_longest_for_is_named(cause):
    others = {f"timing/judge_wait_{one}_s": 5.0 for one in WAITS}
    waits = CALLS | others | {f"timing/judge_wait_{cause}_s": 640.0}
    text = describe_wait(waits, exposed_seconds=71, step_seconds=108)
    assert text.startswith("71.0 of the step's 108.0 s were a wait for rewards.")
    assert "The judge's rate limit is the bottleneck: its calls waited 640 s for" in text
    # 40 calls of 2 s each.
    assert "and 80 s for answers" in text
    assert (cause if cause != "retry_after" else "429") in text


def test_slow_answers_are_distinguished_from_a_rate_limit():
    waits = CALLS | {"timing/judge_wait_max_concurrency_s": 79.0}
    text = describe_wait(waits, exposed_seconds=6, step_seconds=10)
    assert "answers take long, 2.0 s per call" in text


def test_for_a_slow_reward_without_a_judge_process_reward_is_suggested():
    assert "ProcessReward" in describe_wait({}, exposed_seconds=6, step_seconds=10)


def test_the_warning_is_logged_once_in_many_steps(caplog):
    from lit_grpo.callbacks import TimingLog
    from lit_grpo.types import Stage

    class SlowRewards(TimingLog):
        """The toy module has no stages of its own."""

        def on_train_batch_end(self, trainer, pl_module, *rest):
            self.on_stage_end(trainer, pl_module, Stage(name="reward", seconds=1e6))
            super().on_train_batch_end(trainer, pl_module, *rest)

    with caplog.at_level(logging.WARNING, logger="lit_grpo"):
        fit(lambda _: outputs(rollouts([[0.0, 1.0]]), **CALLS), [SlowRewards()], steps=3)
    assert len([one for one in caplog.records if "a wait for rewards" in one.getMessage()]) == 1
