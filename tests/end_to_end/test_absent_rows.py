"""A completion that an engine could not sample is absent: not a zero, not a vote, not a length."""

import pytest
from small_runs import PROMPTS, Keep, make_module, make_trainer
from tiny import completion, prompt

from lit_grpo.callbacks import ExitCheckpoint
from lit_grpo.data import PromptLoader
from lit_grpo.diagnostics import truncated_fraction
from lit_grpo.rewards import Reward
from lit_grpo.rewards.scoring import RewardSuite
from lit_grpo.rollout import EngineFailed, HFEngine
from lit_grpo.stopping import get_stop_reason
from lit_grpo.training.metrics import Metrics, add_rollout_metrics
from lit_grpo.types import Completion, Outcome

FAILED = Completion.failed("400: the prompt is too long")


class Length(Reward):
    def score(self, prompt, completion):
        return float(len(completion.token_ids))


class Rank(Reward):
    """Compares siblings, and remembers how many it was given."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.given = []

    def score_group(self, prompt, completions):
        self.given.append(len(completions))
        return [float(place) for place in range(len(completions))]


class Silent(Reward):
    def score(self, prompt, completion):
        return None


def scored(rewards, *groups):
    with RewardSuite(rewards) as suite:
        scoring = suite.open([prompt(id=str(n)) for n in range(len(groups))], len(groups[0]))
        rows = [one for group in groups for one in group]
        for row, one in enumerate(rows):
            scoring.add(row, one)
        return scoring.result()


def test_no_reward_sees_it_and_its_score_says_why():
    rollouts = scored([Length()], [completion([1]), FAILED, completion([1, 2, 3])])
    scores = rollouts.groups[0].scores["length"]
    assert [score.value for score in scores] == [1.0, None, 3.0]
    assert scores[1].outcome is Outcome.NOT_SAMPLED
    assert scores[1].detail == "400: the prompt is too long"
    assert rollouts.valid.tolist() == [[True, False, True]]
    assert rollouts.rewards[0, 1].isnan()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_siblings_are_compared_without_it_wherever_it_comes(place):
    reward = Rank()
    group = [completion([1]), completion([2])]
    group.insert(place, FAILED)
    rollouts = scored([reward], group, [FAILED] * 3)
    assert reward.given == [2]
    assert rollouts.valid.sum(1).tolist() == [2, 0]
    assert not rollouts.valid[0, place]


def test_it_does_not_make_a_reward_apply_that_abstains_on_the_others():
    rollouts = scored([Length(), Silent()], [completion([1]), FAILED, completion([1, 2])])
    assert rollouts.valid.tolist() == [[True, False, True]]
    assert rollouts.rewards[0, [0, 2]].tolist() == [1.0, 2.0]


def test_it_has_no_length_and_is_not_cut_off():
    cut_off = completion([1, 2, 3, 4], finish_reason="length")
    rollouts = scored([Length()], [completion([1, 2]), FAILED, cut_off, FAILED])
    metrics = Metrics()
    add_rollout_metrics(metrics, rollouts)
    values = metrics.merged()
    assert values["rollout/failed_fraction"] == 0.5
    assert values["completions/mean_length"] == 3
    assert values["completions/min_length"] == 2
    assert values["completions/truncated_fraction"] == truncated_fraction(rollouts) == 0.5
    assert values["sampler/entropy"] == 1.0
    assert values["reward/length/not_sampled_fraction"] == 0.5


def test_a_step_without_any_completion_has_no_lengths():
    metrics = Metrics()
    add_rollout_metrics(metrics, scored([Length()], [FAILED, FAILED]))
    values = metrics.merged()
    assert values["rollout/failed_fraction"] == 1
    assert "completions/mean_length" not in values
    assert "reward/mean" not in values


class Losing(HFEngine):
    """Loses some of the rows that it samples."""

    def __init__(self, lost):
        super().__init__()
        self.lost = lost

    def generate(self, prompts, group_size, sampling, *, seed):
        for row, one in super().generate(prompts, group_size, sampling, seed=seed):
            yield row, FAILED if row in self.lost else one


def fit(engine, *callbacks, **settings):
    module, keep = make_module(engine=engine, **settings), Keep()
    trainer = make_trainer(keep, *callbacks, max_steps=2, num_sanity_val_steps=0)
    trainer.fit(module, PromptLoader(PROMPTS, 4), PromptLoader(PROMPTS, 4, training=False))
    return trainer, keep.outputs


def test_a_step_trains_on_what_is_there():
    trainer, outputs = fit(Losing({1, 6}))
    batch = outputs[0]["batch"]
    assert trainer.global_step == 2
    assert batch.loss_mask.any(1).logical_not().nonzero()[:, 0].tolist() == [1, 6]
    assert batch.advantages[[1, 6]].tolist() == [0, 0]
    assert batch.advantages.abs().sum() > 0


def test_a_step_that_lost_too_much_is_not_trained_on():
    trainer, outputs = fit(Losing(set(range(9))))
    reason = get_stop_reason(trainer)
    assert not outputs[0]
    assert trainer.global_step == 0
    assert reason.exit_code == 4
    assert "completions could not be sampled: 9 of the 16 rows (56%)" in reason.message
    assert "400: the prompt is too long" in reason.message
