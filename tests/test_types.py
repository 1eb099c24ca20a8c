"""Checks of settings and their wording, scores, and batches."""

import math
from fractions import Fraction

import pytest
import torch
from packed_batches import batch_of
from tiny import completion, rollouts

from lit_grpo.types import (
    Completion,
    Outcome,
    Score,
    UserError,
    as_rank_lost,
    check_range,
    check_type,
    counted_rows,
    list_some,
    setting_error,
)


def test_a_refused_setting_names_key_rule_value_reason_and_fix():
    error = setting_error("model.update.epochs", ">= 1", 0, "every step updates the policy")
    assert isinstance(error, UserError)
    assert str(error) == (
        "update.epochs must be >= 1, got 0 (every step updates the policy). "
        "Set model.update.epochs."
    )


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("data.seed", "data.seed"),
        ("model.group_size", "group_size"),
        ("model.engine.init_args.max_concurrent", "max_concurrent"),
    ],
)
def test_a_refused_setting_is_named_without_the_prefix_of_its_key(key, name):
    assert str(setting_error(key, ">= 1", 0)) == f"{name} must be >= 1, got 0. Set {key}."


def test_a_class_in_place_of_an_object_is_told_how_to_write_it():
    with pytest.raises(
        UserError, match=r"got the class Fraction \(write Fraction\(\.\.\.\)\)\. Set"
    ):
        check_type("model.evaluation", Fraction, Fraction)


@pytest.mark.parametrize(
    ("bounds", "inside", "outside", "rule"),
    [
        ({"at_least": 1}, [1, math.inf], [0, -1], ">= 1"),
        ({"at_least": 0.5}, [0.5], [0.4], ">= 0.5"),
        ({"above": 0}, [0.1], [0, -1], "positive"),
        ({"above": 2}, [2.1], [2], "> 2"),
        ({"at_most": 1_000_000}, [1_000_000, -5], [1_000_001], "<= 1000000"),
        ({"at_least": 0, "at_most": 1}, [0, 1], [-0.1, 1.1], "from 0 to 1"),
        ({"above": 0, "at_most": 1}, [0.1, 1], [0, 1.1], "positive and <= 1"),
        ({}, [0, -math.inf], [], "a number"),
    ],
)
def test_a_range_accepts_its_bounds_and_refuses_all_else_with_the_rule(
    bounds, inside, outside, rule
):
    for value in [*inside, None]:
        check_range("data.x", value, **bounds)
    for value in [*outside, math.nan]:
        with pytest.raises(UserError) as error:
            check_range("data.x", value, **bounds, why="reason")
        assert str(error.value) == f"data.x must be {rule}, got {value} (reason). Set data.x."


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_a_score_that_is_ok_needs_a_finite_value(value):
    with pytest.raises(ValueError, match=f"needs a finite value, got {value}"):
        Score(value=value)


def test_a_score_that_failed_must_have_no_value():
    with pytest.raises(ValueError, match=r"outcome timeout must have no value, got 0\.0"):
        Score(value=0.0, outcome=Outcome.TIMEOUT)


def test_only_failures_outside_the_completion_are_an_outage():
    scores = {outcome: Score(value=None, outcome=outcome) for outcome in Outcome if outcome != "ok"}
    failures = {outcome for outcome, score in scores.items() if score.is_failure}
    outages = {outcome for outcome, score in scores.items() if score.is_outage}
    assert scores.keys() - failures == {Outcome.ABSTAIN, Outcome.OTHER_SOURCE}
    assert failures - outages == {Outcome.TRUNCATED, Outcome.NOT_SAMPLED}
    assert not Score(value=1.0).is_failure


def test_a_failed_completion_is_in_the_batch_but_not_among_the_sampled():
    sampled, failed = completion(), Completion.failed("timeout")
    batch = rollouts([[1.0, None]], [[sampled, failed]])
    assert batch.completions == [sampled, failed]
    assert batch.sampled == [sampled]
    assert (failed.is_failed, failed.is_truncated, failed.failure) == (True, False, "timeout")
    assert completion(finish_reason="length").is_truncated


def test_groups_are_replaced_with_all_their_values():
    batch = rollouts([[0, 1], [2, 3], [4, 5]])
    fresh = rollouts([[6, None]], [[completion([9]), completion([8])]])
    replaced = batch.with_groups([1], fresh)
    assert replaced.groups == (batch.groups[0], fresh.groups[0], batch.groups[2])
    assert replaced.valid.tolist() == [[True, True], [True, False], [True, True]]
    for values in (replaced.rewards, replaced.parts["task"]):
        torch.testing.assert_close(
            values.nan_to_num(-1), torch.tensor([[0, 1], [6, -1], [4, 5]], dtype=torch.float64)
        )
    assert batch.rewards.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_results_are_those_of_replaced_groups_as_well():
    batch = rollouts([[0, 1], [2, 2]]).with_groups([1], rollouts([[None, 3]]))
    again = batch.with_groups([1], rollouts([[4, 5]]))
    assert [one.rewards for one in batch.results] == [(2, 2), (0, 1), (3,)]
    assert [one.rewards for one in again.results] == [(2, 2), (3,), (0, 1), (4, 5)]
    excluded = [one.rewards for one in again.without_groups([True, False]).results]
    assert excluded == [(2, 2), (3,), (), (4, 5)]


def test_excluded_groups_have_no_valid_rows_and_no_rewards():
    batch = rollouts([[0, 1], [2, None]])
    excluded = batch.without_groups([True, False])
    assert excluded.valid.tolist() == [[False, False], [True, False]]
    assert excluded.rewards.isnan().tolist() == [[True, True], [False, True]]
    assert excluded.groups == batch.groups


def test_selected_rows_keep_their_prompts_and_are_trimmed_to_the_longest():
    batch = batch_of([1, 2, 3], [[4, 5, 6, 7], [8]], [9], [[5], [6, 7]])
    part = batch.select(torch.tensor([3, 2]))
    assert part.prompt_ids.tolist() == [[9]]
    assert part.prompt_index.tolist() == [0, 0]
    assert part.completion_ids.tolist() == [[6, 7], [5, 0]]
    assert part.completion_mask.tolist() == [[True, True], [True, False]]
    assert part.advantages.tolist() == batch.advantages[[3, 2]].tolist()
    assert part.old_logprobs is None
    assert part.surrogate_mask is part.loss_mask
    assert part.num_rows == 2


def test_a_batch_moves_to_a_device_with_all_its_tensors():
    moved = batch_of([1], [[2, 3]]).to("meta")
    assert moved.prompt_ids.device.type == moved.sampler_logprobs.device.type == "meta"
    assert moved.ref_logprobs is None


def test_counted_rows_are_the_valid_ones_of_groups_with_at_least_two():
    valid = torch.tensor([[True, True, False], [True, False, False], [False] * 3])
    assert counted_rows(valid).tolist() == [[True, True, False], [False] * 3, [False] * 3]


GLOO = "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            RuntimeError(
                f"{GLOO}pair.cc:553] Connection closed by peer [10.77.0.2]:15497. This is "
                "typically caused by a remote worker crashing. Check the logs"
            ),
            "Connection closed by peer [10.77.0.2]:15497. Unless",
        ),
        (
            RuntimeError(f"{GLOO}unbound_buffer.cc:84] Timed out waiting 20000ms for recv"),
            "Timed out waiting 20000ms for recv (the timeout of trainer.strategy). Unless",
        ),
        (
            torch.distributed.DistBackendError("NCCL error\nncclRemoteError: A call failed.\nLast"),
            "ncclRemoteError: A call failed. Unless",
        ),
        (
            torch.distributed.DistNetworkError("Failed to recv, got 0 bytes\nframe #0"),
            "Failed to recv, got 0 bytes. Unless",
        ),
    ],
    ids=["closed", "timeout", "nccl", "store"],
)
def test_an_error_of_a_collective_operation_says_that_another_process_is_gone(error, said):
    lost = as_rank_lost(error)
    assert f"has ended or does not answer: {said} it was killed" in str(lost)
    assert as_rank_lost(lost) is lost


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Connection closed by peer"),
        ConnectionError(f"{GLOO}pair.cc:553] Connection closed by peer"),
        torch.distributed.DistBackendError("NCCL error: ncclInvalidUsage"),
    ],
    ids=["no-collective", "no-runtime-error", "wrong-use"],
)
def test_other_errors_are_not_taken_for_a_lost_process(error):
    assert as_rank_lost(error) is None


@pytest.mark.parametrize(
    ("names", "separator", "listed"),
    [
        (["a", "b"], ", ", "a, b"),
        (["a", "b", "c"], ", ", "a, b and 1 more"),
        (["a", "b", "c", "d"], "; ", "a; b; and 2 more"),
    ],
)
def test_the_first_of_many_names_are_listed(names, separator, listed):
    assert list_some(names, 2, separator) == listed
