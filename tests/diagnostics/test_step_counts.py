"""The counts of ranks are those of their rollouts together, and findings are about all of them."""

from dataclasses import replace

import pytest
import torch
from toy_rollouts import completion, failed, rollouts, train_batch

from lit_grpo.diagnostics.observed_step import ObservedStep
from lit_grpo.diagnostics.step_checks import CHECKS
from lit_grpo.diagnostics.step_counts import count_step
from lit_grpo.types import Outcome

DOWN = failed(Outcome.PARSE_ERROR, "no number")
SPLITS = {
    "values": ([[0.0, 1.0], [1.0, 1.0]], "abcc", [[2.0, 2.0], [0.5, -0.5]], "ddef"),
    "failures": ([[DOWN, 1.0]], "ab", [[DOWN, None], [DOWN, 0.0]], "cdef"),
    "nothing valid here": ([[1.0, 0.0]], "aa", [[None, None]], "bb"),
    "empty and cut off": ([[0.0, 0.0]], ["", "so " * 200], [[1.0, 0.0]], ["", "x"]),
}


def texts(characters):
    return [completion(one, "length" if one == "x" else "stop") for one in characters]


@pytest.mark.parametrize("name", SPLITS)
def test_the_counts_of_two_ranks_are_those_of_their_rows_together(name):
    one, one_texts, other, other_texts = SPLITS[name]
    advantages = [0.0] * (2 * len(one)), [0.5] * (2 * len(other))
    merged = count_step(
        rollouts(one, texts(one_texts)), train_batch(advantages[0]), with_repetition=True
    ) + count_step(
        rollouts(other, texts(other_texts)), train_batch(advantages[1]), with_repetition=True
    )
    together = count_step(
        rollouts([*one, *other], texts([*one_texts, *other_texts])),
        train_batch([*advantages[0], *advantages[1]]),
        with_repetition=True,
    )
    assert merged == together


def test_counts_by_hand():
    batch = rollouts([[1.0, 1.0], [0.0, None]], texts("aaxy"))
    counts = count_step(batch, train_batch([0.0, 0.0], trained=[True, False]))
    assert (counts.num_groups, counts.num_rows, counts.num_valid, counts.num_counted) == (
        2,
        4,
        3,
        2,
    )
    assert (counts.num_with_signal, counts.num_identical, counts.num_truncated) == (0, 1, 1)
    assert (counts.best, counts.worst, counts.equal) == (1.0, 0.0, {1.0: 1})
    assert counts.identical_fraction == 0  # the identical group is solved
    assert counts.only_reward is None
    assert (counts.num_trained, counts.has_advantage, counts.lowest_logprob) == (1, False, -0.5)
    assert counts.failures == {("math", Outcome.ABSTAIN, False): 1}


def test_groups_whose_weights_are_too_old_are_counted_over_ranks():
    batch = rollouts([[1.0, 0.0], [0.0, 1.0]])
    counts = count_step(batch.without_stale([True, True])) + count_step(batch)
    assert (counts.num_stale, counts.stale_fraction) == (2, 0.5)


def test_abstentions_count_where_they_leave_a_row_without_a_reward():
    batch = rollouts([[1.0, 0.5], [0.0, 1.0]])
    ok, declined = batch.groups[0].scores["math"], (failed(Outcome.ABSTAIN),) * 2
    groups = [
        replace(one, scores=one.scores | {"other": scores})
        for one, scores in zip(batch.groups, (declined, ok), strict=True)
    ]
    applies = replace(batch, groups=tuple(groups))
    assert count_step(applies).failures == {}
    lacks = replace(applies, valid=torch.tensor([[True, False], [True, True]]))
    assert count_step(lacks).failures == {("other", Outcome.ABSTAIN, False): 1}


def findings(*ranks):
    """Return what is found in the rollouts and advantages of several ranks."""
    counts = [count_step(batch, trained) for batch, trained in ranks]
    step = ObservedStep(
        counts=sum(counts[1:], counts[0]), metrics={"reward/mean": 1.0}, reward_range=(0.0, 1.0)
    )
    return {name for name, check in CHECKS.items() if check(step)}


EQUAL = rollouts([[1.0, 1.0]], texts("aa")), train_batch([0.0, 0.0])
DIFFERING = rollouts([[0.0, 1.0]], texts("bc")), train_batch([-1.0, 1.0])


def test_what_holds_on_one_rank_only_is_not_said_of_all():
    assert findings(EQUAL) == {"solved"}
    assert findings(EQUAL, DIFFERING) == set()
    assert findings(DIFFERING, EQUAL) == set()
    assert findings((DIFFERING[0], None), DIFFERING) == set()
    cut = rollouts([[0.0, 1.0]], texts("xx")), train_batch([-1.0, 1.0])
    assert "truncated" in findings(cut)
    assert findings(cut, DIFFERING) == {"identical_completions"}  # in half of the groups


def test_a_group_that_is_solved_on_its_rank_is_not_if_another_has_a_better_reward():
    better = rollouts([[2.0, 2.0]], texts("ef")), train_batch([0.0, 0.0])
    assert "solved" in findings(better)
    assert findings(EQUAL, better) == {"equal_rewards", "identical_completions"}


def test_a_group_that_fails_on_its_rank_does_not_mean_that_all_fail():
    worst = rollouts([[0.0, 0.0]], texts("ef")), train_batch([0.0, 0.0])
    assert findings(worst, worst) == {"unsolved"}
    assert findings(worst, EQUAL) == {"equal_rewards"}


def test_rewards_of_another_name_on_another_rank_are_kept():
    one, other = (count_step(rollouts([[0.0, 1.0]])) for _ in range(2))
    assert (one + other).differing == ("math",)
    assert not (count_step(rollouts([[1.0, 1.0]])) + count_step(EQUAL[0])).differing
