"""A step is compared with the median of the older half of the steps before it."""

import pytest
from toy_rollouts import rollouts

from lit_grpo.diagnostics.observed_step import ObservedStep, usual_value
from lit_grpo.diagnostics.step_counts import count_step

COUNTS = count_step(rollouts([[0.0, 1.0]]))


def past_of(*values):
    return [{} if value is None else {"x": value} for value in values]


def step(past, **metrics) -> ObservedStep:
    return ObservedStep(counts=COUNTS, metrics=metrics, past=past_of(*past))


def test_the_usual_value_is_the_median_of_the_older_half():
    assert usual_value(past_of(*range(1, 11)), "x") == 3  # of 1 to 5
    assert usual_value(past_of(8, 2, 4, 6, *[100] * 6), "x") == 6  # of 8, 2, 4, 6 and 100
    assert usual_value(past_of(8, 2, 4, 6, *[100] * 5), "x") is None  # nine are too few


def test_steps_without_the_metric_are_no_part_of_the_past():
    assert usual_value(past_of(*[1.0] * 9, None, None), "x") is None
    assert usual_value(past_of(*[1.0] * 9, None, 1.0), "x") == 1.0
    assert step([1.0] * 10).usual("y") is None


def test_a_factor_is_that_of_the_value_over_the_usual_one():
    assert step([2.0] * 10, x=5.0).factor("x") == 2.5
    assert step([2.0] * 9, x=5.0).factor("x") is None
    assert step([2.0] * 10).factor("x") is None
    assert step([0.0] * 10, x=5.0).factor("x") is None


@pytest.mark.parametrize(
    ("past", "metrics", "has_grown"),
    [
        ([1, 1], {"x": 2}, True),
        ([1, 2], {"x": 2}, False),
        ([3, 2], {"x": 1}, False),
        ([None], {"x": 1}, True),
        ([2], {}, False),
        ([], {"x": 1}, False),
    ],
)
def test_a_count_has_grown_if_it_is_larger_than_after_the_step_before(past, metrics, has_grown):
    assert step(past, **metrics).has_grown("x") is has_grown


@pytest.mark.parametrize(
    ("past", "value", "num_steps"),
    [
        ([1.0] * 12, 4.0, 1),
        ([*[1.0] * 12, 3.0, 2.5], 4.0, 3),  # above 2, the geometric middle of 1 and 4
        ([*[1.0] * 12, 3.0, 1.5], 4.0, 1),
        ([*[1.0] * 12, 3.0, None], 4.0, 3),  # a step without the metric does not end the row
        ([*[4.0] * 12, 1.5], 1.0, 2),
        ([*[4.0] * 12, 2.5], 1.0, 1),
        ([*[-1.0] * 12, 1.5], 3.0, 2),  # above 1, the arithmetic middle of -1 and 3
        ([*[-1.0] * 12, 0.5], 3.0, 1),
        ([1.0] * 9, 4.0, 1),
    ],
)
def test_steps_are_away_that_are_nearer_to_the_present_value_than_to_the_usual(
    past, value, num_steps
):
    assert step(past, x=value).num_steps_away("x") == num_steps
