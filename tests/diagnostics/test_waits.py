import pytest

from lit_grpo.diagnostics.waits import WAITS, describe_wait

CALLS = {"judge/calls": 40.0, "timing/judge_api_latency_s": 2.0}


def test_a_step_that_mostly_computes_has_no_bottleneck():
    waits = CALLS | {"timing/judge_wait_max_concurrency_s": 500.0}
    assert describe_wait(waits, exposed_seconds=4.9, step_seconds=10) is None


@pytest.mark.parametrize("cause", WAITS)
def test_the_setting_that_calls_waited_longest_for_is_named(cause):
    others = {f"timing/judge_wait_{one}_s": 5.0 for one in WAITS}
    waits = CALLS | others | {f"timing/judge_wait_{cause}_s": 640.0}
    text = describe_wait(waits, exposed_seconds=71, step_seconds=108)
    assert text.startswith("The step spent 71.0 of its 108.0 s waiting for rewards.")
    assert "over all calls, 640 s were spent waiting for" in text
    # 40 calls of 2 s each.
    assert "80 s waiting for replies" in text
    assert (cause if cause != "retry_after" else "429") in text


def test_slow_answers_are_distinguished_from_a_rate_limit():
    waits = CALLS | {"timing/judge_wait_max_concurrency_s": 79.0}
    text = describe_wait(waits, exposed_seconds=6, step_seconds=10)
    assert "replies take long: 2.0 s per call" in text


def test_without_a_judge_the_slowest_reward_is_named():
    text = describe_wait({}, 6, 10, lambda: "Reward 'math' is slow.")
    assert "waiting for rewards. Reward 'math' is slow. The columns seconds/NAME in" in text


def test_a_wait_in_a_step_shorter_than_a_second_is_not_reported():
    assert describe_wait({}, exposed_seconds=0.8, step_seconds=0.9) is None
    assert describe_wait({}, exposed_seconds=0.8, step_seconds=1.1) is not None
