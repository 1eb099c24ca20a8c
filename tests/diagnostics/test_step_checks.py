"""Checks of a step against those before it; tests/runs/health/test_monitor.py has the others."""

from dataclasses import replace

import pytest
import torch
from toy_rollouts import completion, failed, rollouts, train_batch

from lit_grpo.diagnostics.causes.table import CAUSES
from lit_grpo.diagnostics.observed_step import ObservedStep
from lit_grpo.diagnostics.step_checks import BEFORE_UPDATE, CHECKS
from lit_grpo.diagnostics.step_counts import count_step
from lit_grpo.types import Outcome

USUAL = {
    "reward/mean": 0.5,
    "reward/std": 0.2,
    "completions/mean_length": 100.0,
    "policy/entropy": 0.5,
    "policy/kl": 0.1,
    "sampler/logprob_difference_mean": 0.02,
    "seconds/generation": 10.0,
    "seconds/reward": 2.0,
    "seconds/update": 10.0,
}
PAST = [USUAL] * 20
GOOD = rollouts([[0.0, 1.0]])


def counts(batch=GOOD, trained=None):
    return count_step(batch, trained, with_repetition=True)


def found(batch=GOOD, trained=None, past=PAST, reward_range=(0.0, 1.0), **metrics):
    """Return the causes of a step whose metrics differ from the usual ones in some."""
    renamed = {name.replace("__", "/"): value for name, value in metrics.items()}
    step = ObservedStep(
        counts=counts(batch, train_batch([-1.0, 1.0]) if trained is None else trained),
        metrics=USUAL | renamed,
        past=past,
        reward_range=reward_range,
    )
    return {name for name, check in CHECKS.items() if check(step)}


def test_every_check_is_a_cause_of_the_table():
    assert CHECKS.keys() <= CAUSES.keys()
    assert {*BEFORE_UPDATE} <= CHECKS.keys()


def test_a_usual_step_shows_nothing():
    assert found() == set()


@pytest.mark.parametrize(
    ("num_truncated", "why"),
    [(0, "every completion with a reward is empty"), (1, "max_tokens: 50% of the completions")],
)
def test_why_nothing_is_trained_on(num_truncated, why):
    nothing = replace(counts(), num_trained=0, num_truncated=num_truncated)
    step = ObservedStep(counts=nothing, metrics=USUAL, past=PAST, reward_range=(0.0, 1.0))
    assert why in CHECKS["nothing_trained"](step)


@pytest.mark.parametrize(
    ("metrics", "is_collapse"),
    [
        ({"reward__mean": 0.3, "completions__mean_length": 30.0}, True),
        ({"reward__mean": 0.3, "policy__entropy": 0.04}, True),
        ({"reward__mean": 0.3}, False),
        ({"reward__mean": 0.6, "completions__mean_length": 30.0}, False),  # shorter and better
        ({"reward__mean": 0.45, "policy__entropy": 0.04}, False),  # within 80% of the usual
    ],
)
def test_a_collapse_is_a_lower_reward_with_another_sign(metrics, is_collapse):
    assert ("collapse" in found(**metrics)) == is_collapse


def test_completions_that_repeat_themselves_are_a_collapse_if_the_reward_falls():
    batch = rollouts([[0.0, 1.0]], [completion("so so " * 60), completion("so " * 90)])
    assert counts(batch).repetitive_fraction == 1
    assert found(batch, reward__mean=0.1) == {"collapse"}
    assert found(batch) == set()


def test_short_texts_and_prose_do_not_repeat_themselves():
    prose = (
        "The train leaves at nine and takes two hours for the 160 km to the coast, so its average "
        "speed is 80 km/h; the bus needs 40 minutes more for the same way, that is 60 km/h on "
        "average, and arrives at a quarter to twelve if it starts at the same time."
    )
    batch = rollouts([[0.0, 1.0]], [completion("7" * 99), completion(prose)])
    assert counts(batch).repetitive_fraction == 0


def test_a_kl_far_above_the_usual_is_an_explosion():
    assert found(policy__kl=1.1) == {"kl_explosion"}
    assert found(policy__kl=0.9) == set()  # nine times
    assert found(policy__kl=0.4, past=[USUAL | {"policy/kl": 0.01}] * 20) == set()  # still small


def test_a_difference_between_sampler_and_policy_is_a_mismatch():
    assert found(sampler__logprob_difference_mean=0.3) == {"sampler_mismatch"}
    assert found(sampler__logprob_difference_mean=0.3, past=[]) == {"sampler_mismatch"}
    usual = [USUAL | {"sampler/logprob_difference_mean": 0.2}] * 20
    assert found(sampler__logprob_difference_mean=0.3, past=usual) == set()


def test_nothing_is_usual_before_ten_steps():
    assert found(policy__kl=9.0, past=PAST[:9]) == set()
    assert found(policy__kl=9.0, past=PAST[:10]) == {"kl_explosion"}


def test_what_is_usual_is_not_learned_from_the_newest_steps():
    bad = USUAL | {"policy/kl": 5.0}
    assert found(policy__kl=5.0, past=[*PAST, *[bad] * 9]) == {"kl_explosion"}


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"seconds/generation": 40.0}, "generation took 40.0 s, 4.0 times as long as usual. "),
        (
            {"seconds/generation": 40.0, "completions/mean_length": 300.0},
            "usual: completions are 3.0 times as long. ",
        ),
        ({"seconds/generation": 40.0, "rollout/restarts": 1.0}, "usual: a server was restarted. "),
        ({"seconds/update": 40.0, "perf/num_compilations": 3.0}, "compiled again for new shapes"),
        ({"seconds/update": 40.0, "memory/num_alloc_retries": 2.0}, "the GPU runs out of memory"),
        (
            {"seconds/update": 40.0, "memory/available_fraction": 0.02},
            "usual: only 2% of the machine's memory is left. ",
        ),
        ({"seconds/reward": 30.0}, "15.0 times as long as usual. Compare"),
        (
            {"seconds/reward": 30.0, "timing/judge_wait_requests_per_minute_s": 400.0},
            "usual: the judge's calls waited 400 s, over all calls, for limits.requests_per_minute",
        ),
        (
            {"seconds/reward": 30.0, "timing/judge_wait_retry_after_s": 100.0},
            "for the server, which answered 429 and asked to wait (Retry-After). Raise the deploy",
        ),
        (
            {"seconds/reward": 30.0, "timing/judge_wait_retry_after_s": 10.0},
            "15.0 times as long as usual. Compare",  # other seconds than these explain it
        ),
        (
            {
                "seconds/reward": 30.0,
                "timing/judge_wait_retry_after_s": 100.0,
                "timing/judge_api_latency_s": 12.5,
                "judge/calls": 64.0,
            },
            "usual: the judge's replies take 12.5 s per call. ",
        ),
    ],
)
def test_a_slow_stage_is_named_with_what_is_known_of_the_reason(metrics, words):
    step = ObservedStep(counts=counts(), metrics=USUAL | metrics, past=PAST)
    assert words in CHECKS["slow_stage"](step)


def test_a_stage_that_takes_a_small_part_of_the_step_is_not_slow():
    assert found(seconds__reward=5.0, seconds__update=21.0) == set()  # 2.5 times; 14% of the step
    usual = [USUAL | {"seconds/reward": 1.0}] * 20
    assert found(seconds__reward=4.0, past=usual) == set()  # 4 times; 17% of the step
    assert found(seconds__reward=6.0, past=usual) == {"slow_stage"}  # 6 times; 23%


@pytest.mark.parametrize(
    ("rewards", "reward_range", "cause"),
    [
        ([1.0, 1.0], (0.0, 1.0), "solved"),
        ([1.2, 1.2], (0.0, 1.0), "solved"),  # better than ever
        ([0.0, 0.0], (-1.0, 0.0), "solved"),  # the best of a penalty
        ([-1.0, -1.0], (-1.0, 1.0), "unsolved"),
        ([0.0, 0.0], (0.0, 1.0), "unsolved"),
        ([-0.2, -0.2], (0.0, 1.0), "unsolved"),  # worse than ever
        ([1.0, 1.0], (0.0, 1.2), "equal_rewards"),
        ([0.5, 0.5], (0.0, 1.0), "equal_rewards"),
        ([1.0, 1.0], (1.0, 1.0), "equal_rewards"),  # they never differed
        ([1.0, 1.0], None, "equal_rewards"),  # the first step
        ([-1.0, None], (-1.0, 1.0), "unsolved"),  # a score that is missing is none
    ],
)
def test_a_step_with_one_reward_is_solved_or_fails_if_it_is_the_best_or_worst_of_a_run_that_varied(
    rewards, reward_range, cause
):
    step = found(rollouts([rewards]), train_batch([0.0, 0.0]), reward_range=reward_range)
    assert step == {cause}


def test_groups_with_different_rewards_are_equal_inside_and_neither_solved_nor_failed():
    batch = rollouts([[1.0, 1.0], [0.0, 0.0]])
    assert found(batch, train_batch([0.0] * 4)) == {"equal_rewards"}


def test_rewards_that_cancel_out_at_the_worst_value_do_not_fail():
    batch = rollouts([[0.0, 0.0]])
    batch = replace(batch, parts={"math": torch.tensor([[0.5, -0.5]])})
    assert found(batch, train_batch([0.0, 0.0])) == {"cancelling_rewards"}


def test_empty_completions_of_half_the_rows_are_found():
    batch = rollouts([[0.0, 1.0]], [completion("  \n"), completion("a")])
    assert found(batch) == {"empty"}


def test_replies_that_cannot_be_parsed_are_found_by_reward():
    bad = failed(Outcome.PARSE_ERROR, "not a number: 'good'")
    step = ObservedStep(
        counts=counts(rollouts([[bad, 1.0], [0.0, bad]]), train_batch([1.0] * 4)), metrics={}
    )
    assert CHECKS["unparseable"](step).startswith(
        "50% of the scores of reward 'math' ended as parse_error, for instance: not a number"
    )


def test_weights_and_gradients_that_are_not_finite_are_found():
    step = ObservedStep(
        counts=counts(GOOD, train_batch([-1.0, 1.0])),
        metrics={"reward/mean": torch.nan},
        num_skipped=5,
        weights_are_finite=False,
    )
    found = [name for name, check in CHECKS.items() if check(step)]
    assert found == ["not_finite_weights", "not_finite_gradient"]


def test_completions_that_cannot_end_are_not_told_to_end():
    cut = counts(rollouts([[0.0, 1.0]], [completion("a", "length"), completion("b", "length")]))
    assert CHECKS["truncated"](ObservedStep(counts=cut, metrics={}))
    assert not CHECKS["truncated"](ObservedStep(counts=cut, metrics={}, can_end=False))
