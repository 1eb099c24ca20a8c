"""Rewards that value single tokens or steps, up to the advantages of the tokens."""

import pytest
import torch
from small_runs import fit, make_module
from tiny import completion, prompt, unbatched_logprobs

from lit_grpo.objective import AdvantageConfig, KLTerm, Objective
from lit_grpo.policy.byte_tokenizer import byte_tokenizer
from lit_grpo.rewards import Reward
from lit_grpo.rewards.scoring.suite import RewardSuite
from lit_grpo.rewards.steps import tokens_at
from lit_grpo.types import Outcome, Score

BY_BATCH = AdvantageConfig(
    baseline="batch", deviation="none", batch_statistics="tokens", discount=0.5
)


def written(text):
    ids = byte_tokenizer()(text, add_special_tokens=False)["input_ids"]
    return completion(ids, text=text)


def test_a_score_by_token_has_their_sum_as_its_value():
    score = Score.by_token([None, 0.5, None, -2])
    assert (score.value, score.steps) == (-1.5, ((1, 0.5), (3, -2.0)))
    assert Score.by_token([None, None]).value == 0


@pytest.mark.parametrize(("end", "token"), [(1, 0), (3, 2), (4, 5), (6, 7)])
def test_the_end_of_a_step_is_the_token_that_completes_it(end, token):
    """A dash has three bytes, each a token here: the fourth character is complete with the last."""
    assert tokens_at(written("So —4."), byte_tokenizer(), [end]) == [token]


@pytest.mark.parametrize("end", [0, 4])
def test_an_end_outside_of_the_text_is_refused(end):
    with pytest.raises(ValueError, match=f"from 1 to 3 .*, got {end}"):
        tokens_at(written("abc"), byte_tokenizer(), [2, end])


class LowBytes(Reward):
    """Give a value to every other token."""

    def score(self, prompt, completion):
        low = [float(token < 128) for token in completion.token_ids]
        return Score.by_token([one if t % 2 else None for t, one in enumerate(low)])


class Constant(Reward):
    def score(self, prompt, completion):
        return 3.0


def expected_returns(batch, kl=None) -> list[list[float]]:
    """Return the discounted rewards from each token on: 2 for steps, 3 for the end."""
    found = []
    for n in range(batch.num_rows):
        ids = batch.completion_ids[n][batch.completion_mask[n]].tolist()
        rewards = [2.0 * (token < 128) * (t % 2) for t, token in enumerate(ids)]
        rewards[-1] += 3.0
        if kl is not None:
            rewards = [reward - kl[n][t] for t, reward in enumerate(rewards)]
        found.append([sum(0.5**s * r for s, r in enumerate(rewards[t:])) for t in range(len(ids))])
    return found


def assert_advantages_are(batch, returns):
    mean = sum(map(sum, returns)) / sum(map(len, returns))
    for n, row in enumerate(returns):
        found = batch.advantages[n, : len(row)].tolist()
        assert found == pytest.approx([value - mean for value in row], abs=1e-5)
        assert not batch.advantages[n, len(row) :].any()


def test_values_of_tokens_and_of_completions_become_advantages_of_tokens():
    rewards = [LowBytes(weight=2.0), Constant()]
    (output,) = fit(make_module(rewards=rewards, advantage=BY_BATCH))
    batch = output["batch"]
    returns = expected_returns(batch)
    assert_advantages_are(batch, returns)
    assert len({len(row) for row in returns}) > 1
    values = batch.advantages[batch.loss_mask]
    assert output["metrics"]["advantage/max"] == pytest.approx(values.max().item())
    assert output["metrics"]["advantage/abs_mean"] == pytest.approx(values.abs().mean().item())


def test_the_divergence_is_taken_from_the_reward_token_by_token():
    objective = Objective(kl=KLTerm(estimator="k1", coef=0.3, place="reward"))
    rewards = [LowBytes(weight=2.0), Constant()]
    module = make_module(rewards=rewards, advantage=BY_BATCH, objective=objective)
    reference = make_module()
    reference.configure_model()
    _, output = fit(module, max_steps=2)
    batch = output["batch"]
    kl = []
    for n in range(batch.num_rows):
        with torch.no_grad():
            theirs, _ = unbatched_logprobs(reference.policy.model, batch, n)
        ours = batch.old_logprobs[n, : len(theirs)]
        kl.append((0.3 * (ours - theirs)).tolist())
    assert max(abs(value) for row in kl for value in row) > 1e-3
    assert_advantages_are(batch, expected_returns(batch, kl))


def test_without_a_discount_a_completion_has_the_sum_of_its_steps():
    (output,) = fit(make_module(rewards=[LowBytes()], advantage=AdvantageConfig(deviation="none")))
    rewards = output["rollouts"].rewards
    expected = rewards - rewards.mean(1, keepdim=True)
    assert output["batch"].advantages.tolist() == pytest.approx(expected.flatten().tolist())


class Beyond(Reward):
    def score(self, prompt, completion):
        return Score(value=1.0, steps=((len(completion.token_ids), 1.0),))


class TooFew(Reward):
    def score(self, prompt, completion):
        return Score.by_token([1.0])


@pytest.mark.parametrize(
    ("reward", "problem"),
    [
        (Beyond(), "steps at tokens [2] of a completion with 2 tokens"),
        (TooFew(), "1 values by token of a completion with 2 tokens"),
    ],
)
def test_steps_of_other_tokens_than_those_of_the_completion_are_a_mistake(reward, problem):
    with RewardSuite([reward]) as suite:
        scoring = suite.open([prompt()], 1)
        scoring.add(0, completion((5, 6)))
        (score,) = scoring.result().groups[0].scores[reward.name]
    assert (score.value, score.outcome) == (None, Outcome.ERROR)
    assert score.bug == score.detail
    assert score.detail.startswith(problem)
