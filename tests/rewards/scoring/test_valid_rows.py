import pytest
import torch
from tiny import completion, prompt

from lit_grpo.rewards import Reward
from lit_grpo.rewards.scoring.valid_rows import combine
from lit_grpo.types import Group, Outcome, Score

NAN = float("nan")
A = Score(value=None, outcome=Outcome.ABSTAIN)
FAILURES = [
    Score(value=None, outcome=outcome)
    for outcome in Outcome
    if outcome not in (Outcome.OK, Outcome.ABSTAIN, Outcome.OTHER_SOURCE)
]
E = FAILURES[0]


class Named(Reward):
    def score(self, prompt, completion):
        return None


def combined(settings, *groups):
    """Combine groups, which map a reward to its scores; numbers stand for ok scores."""
    rewards = [Named(name=name, **setting) for name, setting in settings.items()]
    made = []
    for group in groups:
        scores = {
            name: tuple(s if isinstance(s, Score) else Score(value=s) for s in row)
            for name, row in group.items()
        }
        size = len(next(iter(scores.values())))
        made.append(Group(prompt=prompt(), completions=(completion(),) * size, scores=scores))
    return combine(rewards, made)


def assert_rewards(batch, expected):
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(batch.rewards, expected, rtol=0, atol=1e-12, equal_nan=True)
    assert batch.valid.tolist() == (~expected.isnan()).tolist()


def test_sum_is_weighted_and_parts_are_not():
    batch = combined({"a": {"weight": 2.0}, "b": {"weight": -0.5}}, {"a": [1, 0], "b": [4, 2]})
    assert_rewards(batch, [[0.0, -1.0]])
    assert batch.parts["a"].tolist() == [[1.0, 0.0]]
    assert batch.parts["b"].tolist() == [[4.0, 2.0]]
    assert batch.parts["a"].dtype == batch.rewards.dtype == torch.float64


@pytest.mark.parametrize("failure", FAILURES, ids=lambda score: score.outcome)
def test_row_that_any_reward_failed_on_is_excluded_and_not_zero(failure):
    batch = combined({"a": {}, "b": {}}, {"a": [1, 1, 1], "b": [failure, 0, 5]})
    assert_rewards(batch, [[NAN, 1.0, 6.0]])
    assert batch.parts["a"].tolist() == [[1.0, 1.0, 1.0]]
    assert batch.parts["b"][0, 0].isnan()


def test_reward_that_fails_on_a_whole_group_still_applies():
    batch = combined({"a": {}, "b": {}}, {"a": [1, 1], "b": [E, E]}, {"a": [1, 2], "b": [3, 4]})
    assert_rewards(batch, [[NAN, NAN], [4.0, 6.0]])


def test_reward_that_abstains_on_a_whole_group_does_not_apply_to_it():
    batch = combined({"a": {}, "b": {}}, {"a": [1, 2], "b": [A, A]}, {"a": [1, 2], "b": [3, 4]})
    assert_rewards(batch, [[1.0, 2.0], [4.0, 6.0]])
    assert batch.parts["b"][0].isnan().all()


def test_reward_that_abstains_on_some_rows_excludes_those():
    assert_rewards(combined({"a": {}, "b": {}}, {"a": [1, 2], "b": [A, 4]}), [[NAN, 6.0]])


def test_reward_with_abstentions_and_a_failure_still_applies():
    assert_rewards(combined({"a": {}, "b": {}}, {"a": [1, 2], "b": [A, E]}), [[NAN, NAN]])


def test_group_to_which_no_reward_applies_is_invalid():
    batch = combined({"a": {}, "b": {}}, {"a": [A, A], "b": [A, A]}, {"a": [0, 1], "b": [A, A]})
    assert_rewards(batch, [[NAN, NAN], [0.0, 1.0]])


def test_reward_of_weight_zero_is_monitored_only():
    for on_error in ("mask", "drop_group"):
        settings = {"a": {}, "b": {"weight": 0.0, "on_error": on_error}}
        batch = combined(settings, {"a": [1, 2, 3], "b": [7, E, A]})
        assert_rewards(batch, [[1.0, 2.0, 3.0]])
        assert batch.parts["b"][0, 0] == 7


def test_weight_zero_cannot_make_a_row_valid():
    batch = combined({"a": {}, "b": {"weight": 0.0}}, {"a": [A, A], "b": [1, 1]})
    assert_rewards(batch, [[NAN, NAN]])


@pytest.mark.parametrize("failure", FAILURES, ids=lambda score: score.outcome)
def test_drop_group_excludes_all_siblings_of_a_failure(failure):
    settings = {"a": {}, "b": {"on_error": "drop_group"}}
    batch = combined(settings, {"a": [1, 2], "b": [failure, 4]}, {"a": [E, 2], "b": [3, 4]})
    assert_rewards(batch, [[NAN, NAN], [NAN, 6.0]])


def test_drop_group_ignores_abstentions():
    settings = {"a": {}, "b": {"on_error": "drop_group"}}
    assert_rewards(combined(settings, {"a": [1, 2], "b": [A, 4]}), [[NAN, 6.0]])


def test_zero_is_a_value():
    assert_rewards(combined({"a": {}}, {"a": [0.0, 0.0]}), [[0.0, 0.0]])
