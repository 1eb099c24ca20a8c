"""Phases of a curriculum, and how many prompts of a step each source has."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_grpo.data.loading.curriculum import Curriculum, Phase, parse_curriculum, quotas
from lit_grpo.types import UserError

BOTH = {"verifiable": 1.0, "open": 1.0}
TEXT = "0.8:0.2:0.4 0.5:0.5:0.3 0.2:0.8:0.3:0.5"


def phase(fraction: float, lr_scale: float = 1.0) -> Phase:
    return Phase(weights=BOTH, fraction=fraction, lr_scale=lr_scale)


def test_text_and_a_list_say_the_same():
    phases = (
        Phase(weights={"verifiable": 0.8, "open": 0.2}, fraction=0.4),
        Phase(weights={"verifiable": 0.5, "open": 0.5}, fraction=0.3),
        Phase(weights={"verifiable": 0.2, "open": 0.8}, fraction=0.3, lr_scale=0.5),
    )
    assert parse_curriculum(TEXT, BOTH) == phases
    assert parse_curriculum(list(phases), BOTH) == phases
    assert parse_curriculum(TEXT, {"open": 1.0, "verifiable": 1.0}) == phases


def test_without_a_curriculum_there_is_one_phase_with_the_weights_of_the_sources():
    (only,) = parse_curriculum(None, {"a": 0.7, "b": 0.3})
    assert only.weights == {"a": 0.7, "b": 0.3}


@pytest.mark.parametrize(
    ("value", "weights", "reason"),
    [
        ("0.8:0.2", BOTH, "'0.8:0.2'"),
        ("1:0:1:1:1", BOTH, "form verifiable:open"),
        ("a:b:c", BOTH, "form verifiable:open"),
        ("0.8:0.2:0", BOTH, "fraction must be positive"),
        ("0.8:0.2:inf", BOTH, "fraction must be finite"),
        ("0.8:0.2:1:-1", BOTH, "lr_scale must be >= 0"),
        ("0.8:0.2:1:inf", BOTH, "lr_scale must be finite"),
        ("0.8:0.2:1", {"sums": 1.0, "open": 1.0}, "a list of phases"),
        ([Phase(weights={"other": 1.0}, fraction=1.0)], BOTH, "other"),
        ([Phase(weights={"opne": 1.0}, fraction=1.0)], BOTH, r"got one of opne.* mean open\?"),
        ([phase(1), phase(0)], BOTH, r"data.curriculum.1.fraction must be positive, got 0"),
        (3601, BOTH, "quote it"),
        ("", BOTH, "quote it"),
    ],
)
def test_what_is_no_curriculum_is_refused(value, weights, reason):
    with pytest.raises(UserError, match=reason):
        parse_curriculum(value, weights)


def test_a_phase_begins_at_its_boundary_and_the_last_never_ends():
    curriculum = Curriculum.over(parse_curriculum(TEXT, BOTH), 20, 1)
    assert curriculum.boundaries == (8, 14)
    assert [curriculum.index_at(step) for step in (0, 7, 8, 13, 14, 19, 1000)] == [
        *(0, 0, 1, 1, 2, 2, 2)
    ]
    assert [curriculum.lr_scale(step) for step in (0, 13, 14)] == [1.0, 1.0, 0.5]


def test_boundaries_are_those_of_rollout_steps_and_fractions_are_relative():
    thirds = [phase(3), phase(3), phase(3)]
    assert Curriculum.over(thirds, 16, 4).boundaries == (4, 12)
    assert Curriculum.over(thirds, 9, 1).boundaries == (3, 6)


def test_a_phase_without_a_step_is_refused():
    with pytest.raises(UserError, match="none in phase 1 of 2"):
        Curriculum.over([phase(0.01), phase(0.99)], 20, 1)
    with pytest.raises(UserError, match="none in phase 2 of 2"):
        Curriculum.over([phase(0.99), phase(0.01)], 20, 1)


def test_a_step_is_divided_by_largest_remainder_and_ties_go_in_order():
    assert quotas({"a": 0.7, "b": 0.3}, 8) == {"a": 6, "b": 2}
    assert quotas({"a": 0.7, "b": 0.3}, 10) == {"a": 7, "b": 3}
    assert quotas({"a": 1, "b": 1}, 5) == {"a": 3, "b": 2}
    assert quotas({"a": 1, "b": 0}, 5) == {"a": 5, "b": 0}


@given(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.integers(1, 300))
def test_no_source_is_a_whole_prompt_away_from_its_share(weights, total):
    named = {f"s{index}": weight / 10 for index, weight in enumerate(weights)}
    try:
        numbers = quotas(named, total)
    except UserError as error:
        assert "prompts_per_step" in str(error)  # noqa: PT017
        return
    assert sum(numbers.values()) == total
    for name, weight in zip(named, weights, strict=True):
        assert abs(numbers[name] - Fraction(weight * total, sum(weights))) < 1


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ({"a": 0.0}, "at least one source"),
        ({"a": 1.0, "b": -1.0}, "weight of b"),
        ({"a": 1.0, "b": float("nan")}, "weight of b"),
        ({"a": 0.99, "b": 0.01}, "'b' with weight 0.01 of 1 has 0.16 of prompts_per_step 16"),
    ],
)
def test_weights_that_a_step_cannot_have_are_refused(weights, reason):
    with pytest.raises(UserError, match=reason):
        quotas(weights, 16)
