"""Advantages, masks and logprobs of the rollouts of whole steps."""

import pytest
import torch
from small_runs import ShareOfLowBytes, fit, make_module, start_policy
from tiny import unbatched_logprobs

from lit_grpo.objective import AdvantageConfig, KLTerm, Objective
from lit_grpo.rewards import Reward


def test_only_valid_rows_count_in_the_group_mean_and_are_trained_on():
    class HalfDown(Reward):
        def score(self, prompt, completion):
            return None if completion.token_ids[0] % 2 else float(len(completion.token_ids))

    (output,) = fit(make_module(rewards=[HalfDown()]))
    batch, rollouts = output["batch"], output["rollouts"]
    trained = batch.loss_mask.any(1)
    valid = rollouts.valid.flatten()
    assert 0 < valid.sum() < len(valid)
    assert not (trained & ~valid).any()
    assert not batch.advantages[~valid].any()
    lengths = torch.tensor([len(c.token_ids) for c in rollouts.completions], dtype=torch.float64)
    for group, counts in enumerate(rollouts.valid):
        own = lengths.view(4, 4)[group][counts]
        if len(own) >= 2 and own.std() > 0:
            expected = (own - own.mean()) / own.std()
            got = batch.advantages.view(4, 4)[group][counts].double()
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_overlong_filtering_excludes_truncated_completions_from_the_loss():
    (output,) = fit(make_module(objective=Objective(overlong_filtering=True)))
    truncated = torch.tensor([c.is_truncated for c in output["rollouts"].completions])
    assert truncated.any()
    assert not output["batch"].loss_mask[truncated].any()
    assert output["batch"].loss_mask[~truncated].any()


def test_batch_deviation_and_normalise_then_sum_reach_the_advantages():
    class Length(Reward):
        def score(self, prompt, completion):
            return float(len(completion.token_ids))

    config = AdvantageConfig(deviation="batch", combine="normalise_then_sum")
    (output,) = fit(make_module(rewards=[ShareOfLowBytes(), Length(weight=0.5)], advantage=config))
    expected = torch.zeros(4, 4, dtype=torch.float64)
    for name, weight in (("share_of_low_bytes", 1.0), ("length", 0.5)):
        part = output["rollouts"].parts[name]
        expected += weight * (part - part.mean(1, keepdim=True)) / part.std()
    torch.testing.assert_close(output["batch"].advantages, expected.flatten().float())


def test_the_divergence_is_subtracted_from_the_reward_before_the_advantages():
    kl = KLTerm(estimator="k1", coef=0.3, place="reward")
    module = make_module(objective=Objective(kl=kl), advantage=AdvantageConfig(deviation="none"))
    _, output = fit(module, max_steps=2)
    batch, rewards = output["batch"], output["rollouts"].rewards
    assert batch.ref_logprobs is None  # the loss has no KL term
    start = start_policy()
    with torch.no_grad():
        ref = torch.stack([unbatched_logprobs(start.model, batch, n)[0].sum() for n in range(16)])
    penalty = 0.3 * (batch.old_logprobs.sum(1) - ref).double()
    assert penalty.abs().max() > 1e-3
    penalised = rewards - penalty.view(4, 4)
    expected = penalised - penalised.mean(1, keepdim=True)
    got = batch.advantages.view(4, 4).double()
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    per_token = penalty.sum() / 0.3 / batch.loss_mask.sum()
    assert output["metrics"]["policy/kl"] == pytest.approx(per_token.item(), abs=1e-5)
