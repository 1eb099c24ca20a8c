"""Rows whose completion could not be sampled: not scored, excluded, and named as the cause."""

import pytest
from tiny import completion, prompt

from lit_grpo.rewards import Reward
from lit_grpo.rewards.scoring.suite import RewardSuite
from lit_grpo.types import Completion, Outcome

FAILED = Completion.failed("400: the prompt is too long")


class Length(Reward):
    def score(self, prompt, completion):
        return float(len(completion.token_ids))


class Rank(Reward):
    """Compares siblings, and records how many it was given."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.group_sizes = []

    def score_group(self, prompt, completions):
        self.group_sizes.append(len(completions))
        return [float(place) for place in range(len(completions))]


class Abstaining(Reward):
    def score(self, prompt, completion):
        return None


def scored(rewards, *groups):
    with RewardSuite(rewards) as suite:
        return suite.score([prompt(id=str(n)) for n in range(len(groups))], groups)


def test_a_row_without_a_completion_is_not_scored_and_its_score_says_why():
    rollouts = scored([Length()], [completion([1]), FAILED, completion([1, 2, 3])])
    scores = rollouts.groups[0].scores["length"]
    assert [score.value for score in scores] == [1.0, None, 3.0]
    assert scores[1].outcome is Outcome.NOT_SAMPLED
    assert scores[1].detail == "400: the prompt is too long"
    assert rollouts.valid.tolist() == [[True, False, True]]
    assert rollouts.rewards[0, 1].isnan()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_siblings_are_compared_without_a_row_that_has_no_completion(place):
    reward = Rank()
    group = [completion([1]), completion([2])]
    group.insert(place, FAILED)
    rollouts = scored([reward], group, [FAILED] * 3)
    assert reward.group_sizes == [2]
    assert rollouts.valid.sum(1).tolist() == [2, 0]
    assert not rollouts.valid[0, place]


def test_a_reward_that_abstains_on_all_other_rows_does_not_apply_to_the_group():
    rollouts = scored([Length(), Abstaining()], [completion([1]), FAILED, completion([1, 2])])
    assert rollouts.valid.tolist() == [[True, False, True]]
    assert rollouts.rewards[0, [0, 2]].tolist() == [1.0, 2.0]
