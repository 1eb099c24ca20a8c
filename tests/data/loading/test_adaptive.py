"""Rows that are sampled by what the policy could do with them."""

import numpy as np
import pytest

from lit_grpo.data.loading.adaptive import Adaptive, AdaptiveOrder
from lit_grpo.data.loading.curriculum import Curriculum, Phase
from lit_grpo.data.loading.mixture_loader import MixtureLoader
from lit_grpo.types import Prompt, UserError
from lit_grpo.types.rollouts import GroupResult


def order(number: int = 10, long: tuple[int, ...] = (), **settings) -> AdaptiveOrder:
    prompts = [
        None if row in long else Prompt(id=str(row), text="x", token_ids=(1,), source="a", row=row)
        for row in range(number)
    ]
    return AdaptiveOrder("a", prompts, (0,), Adaptive(**settings))


def taken(source: AdaptiveOrder, number: int) -> list[int]:
    return [prompt.row for prompt in source.take(number)]


def result(row: int, *rewards: float) -> GroupResult:
    return GroupResult(source="a", row=row, rewards=rewards)


def shares(source: AdaptiveOrder) -> list[float]:
    return [
        source.metrics()[f"adaptive/a/{name}"] for name in ("easy", "normal", "hard", "resting")
    ]


def test_without_results_every_row_is_normal_and_comes_once_before_any_comes_again():
    source = order()
    first = taken(source, 6) + taken(source, 4)
    assert sorted(first) == list(range(10))
    assert first != sorted(first)
    assert taken(source, 10) == first
    assert shares(source) == [0, 1, 0, 0]


def test_a_row_s_level_follows_a_moving_average_of_its_successes():
    source = order(4, momentum=0.5, success=0.7)
    source.record([result(0, 0.7, 0.9, 1.0, 0.1), result(1, 0.1, 0.2), result(2)])
    assert shares(source) == [0, 0.75, 0.25, 0]  # row 0 has 3 of 4, row 2 nothing
    source.record([result(0, 1.0, 1.0, 1.0, 0.9), result(1, 0.7, 0.1)])
    # Row 0: (0.75 + 1) / 2 = 0.875, and it is solved; row 1: (0 + 0.5) / 2 = 0.25.
    assert shares(source) == [0, 0.75, 0, 0.25]
    source.record([result(0, *[1.0] * 9, 0.0)])
    assert source._share[0] == pytest.approx(0.8875)
    taken(source, 8)  # two epochs of four rows
    assert shares(source) == [0.25, 0.75, 0, 0]


def test_levels_are_sampled_by_their_shares_and_the_row_of_the_longest_ago_first():
    source = order(90, shares={"easy": 1, "normal": 2, "hard": 1}, solved_at=2.0)
    first = taken(source, 90)
    easy, hard = first[:30], first[60:]
    source.record([result(row, 1.0) for row in easy] + [result(row, 0.0) for row in hard])
    assert shares(source) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    rows = [row for _ in range(25) for row in taken(source, 4)]
    numbers = [len([row for row in rows if row in one]) for one in (easy, first[30:60], hard)]
    assert numbers == pytest.approx([25, 50, 25], abs=1)
    assert [row for row in rows if row in easy] == easy[: numbers[0]]
    assert [row for row in rows if row in first[30:60]] == (2 * first[30:60])[: numbers[1]]


def test_a_level_without_rows_is_filled_from_the_others_and_resting_rows_come_last():
    source = order(4, shares={"easy": 1, "normal": 0, "hard": 0}, rest_epochs=100)
    first = taken(source, 4)
    source.record([result(row, 1.0) for row in first[:2]] + [result(first[2], 0.0)])
    assert shares(source) == [0, 0.25, 0.25, 0.5]
    assert taken(source, 4) == [first[3], first[2], first[0], first[1]]
    assert len(set(taken(source, 3))) == 3


def test_long_prompts_are_passed_over():
    source = order(6, long=(1, 4))
    assert set(taken(source, 12)) == {0, 2, 3, 5}
    with pytest.raises(UserError, match="none of the 3 prompts is within max_prompt_tokens"):
        order(3, long=(0, 1, 2)).take(1)


def test_rows_that_are_looked_at_can_be_given_back():
    source = order(long=(3,))
    taken(source, 4)
    here = source.position()
    rows = taken(source, 5)
    source.record([result(rows[0], 1.0)])
    source.move_to(here)
    again = taken(source, 5)
    assert again[:4] == rows[1:]  # what is known of the first stays: it rests


def test_a_loaded_order_goes_on_as_the_saved_one():
    random = np.random.default_rng(1)
    source, other = order(20, long=(7,)), order(20, long=(7,))

    def step(one: AdaptiveOrder, successes) -> list[int]:
        rows = taken(one, 6)
        one.record([result(row, *successes[row]) for row in rows])
        return rows

    rewards = random.integers(0, 2, (30, 20, 3)).astype(float)
    for number in range(12):
        step(source, rewards[number])
    other.load_state_dict(source.state_dict())
    for number in range(12, 30):
        assert step(source, rewards[number]) == step(other, rewards[number])
    assert shares(source) == shares(other)


def test_results_reach_the_sources_that_they_are_of():
    sources = [order(), order()]
    sources[1].name = "b"
    phase = Phase(weights={"a": 1, "b": 1}, fraction=1)
    loader = MixtureLoader(sources, 4, Curriculum(phases=(phase,)), lambda ahead: ahead)
    assert loader.is_adaptive
    loader.record([result(3, 0.0), GroupResult(source="b", row=5, rewards=(0.0,))])
    assert [np.flatnonzero(one._share == 0).tolist() for one in sources] == [[3], [5]]
    assert loader.metrics()["adaptive/b/hard"] == 0.1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shares": {"simple": 1}}, "shares of easy, normal, hard"),
        ({"shares": {"easy": -1}}, r"shares.easy must be >= 0"),
        ({"shares": {"easy": 0.5, "normal": 0.9}}, "of easy, normal, hard, got none of hard"),
        ({"shares": {"easy": 0, "normal": 0, "hard": 0}}, "a share above 0"),
        ({"hard_below": 0.9}, r"hard_below must be .*0.8"),
        ({"momentum": 2}, "momentum must be"),
        ({"rest_epochs": -1}, "rest_epochs must be >= 0"),
        ({"easy_above": 80}, "easy_above must be"),
        ({"solved_at": 0}, "solved_at must be positive"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        Adaptive(**settings)
