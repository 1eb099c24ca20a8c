"""The loss of a micro-batch: how its terms, masks and weights are combined."""

import math
from dataclasses import replace

import pytest
import torch
from loss_batches import counts_of, losses_of, train_batch

from lit_grpo.objective import EntropyTerm, KLTerm, Objective, SamplerCorrection
from lit_grpo.objective.aggregations import AGGREGATIONS
from lit_grpo.objective.loss import token_losses

UNCORRECTED = Objective(sampler_correction=None)


def test_at_ratio_one_the_gradient_is_that_of_reinforce():
    logprobs = torch.tensor([[-1.0, -2.0], [-0.5, 0.0]], requires_grad=True)
    batch = train_batch([2.0, -1.0], [[1, 1], [1, 0]], sampler_logprobs=logprobs.detach())
    losses_of(logprobs, batch, Objective()).loss.backward()
    assert logprobs.grad.flatten().tolist() == pytest.approx([-2 / 3, -2 / 3, 1 / 3, 0])


def test_the_ratio_over_the_old_policy_is_clipped_where_it_exceeds_its_bounds():
    logprobs = torch.tensor([[0.6, 0.3], [0.3, 0.6], [0.6, 0.6]]).log()
    old = torch.tensor([[0.4, 0.6], [0.6, 0.4], [0.6, 0.6]]).log()
    batch = train_batch([1.0, -1.0, 1.0], torch.ones(3, 2), old_logprobs=old)
    losses = losses_of(logprobs, batch, UNCORRECTED)
    assert losses.ratio.flatten().tolist() == pytest.approx([1.5, 0.5, 0.5, 1.5, 1, 1])
    assert losses.surrogate.flatten().tolist() == pytest.approx([-1.2, -0.5, 0.8, 1.5, -1, -1])
    assert losses.clipped_high.tolist() == [[True, False], [False, False], [False, False]]
    assert losses.clipped_low.tolist() == [[False, False], [True, False], [False, False]]


def test_a_sequence_shares_one_ratio_and_one_bound():
    logprobs = torch.tensor([[2.0, 8.0, 100.0]]).log()  # geometric mean 4 of the first two
    batch = train_batch([1.0], [[1, 1, 0]], old_logprobs=torch.zeros(1, 3))
    losses = losses_of(logprobs, batch, replace(UNCORRECTED, ratio="sequence"))
    assert losses.ratio.flatten().tolist() == pytest.approx([4.0] * 3)
    assert losses.clipped_high.all()
    assert losses.loss.item() == pytest.approx(-1.2)


def test_sampler_correction_multiplies_the_surrogate_up_to_its_bound():
    logprobs = torch.tensor([[0.6, 0.9]]).log()
    batch = train_batch([1.0], [[1, 1]], sampler_logprobs=torch.tensor([[0.4, 0.1]]).log())
    corrected = losses_of(logprobs, batch, Objective(sampler_correction=SamplerCorrection()))
    assert corrected.surrogate.flatten().tolist() == pytest.approx([-1.5, -2.0])
    assert corrected.sampler_log_ratio.exp().flatten().tolist() == pytest.approx([1.5, 9.0])
    plain = losses_of(logprobs, batch, UNCORRECTED)
    assert plain.surrogate.flatten().tolist() == pytest.approx([-1.0, -1.0])


def test_kl_is_weighed_like_the_surrogate_and_added_with_its_coefficient():
    batch = train_batch([0.0], [[1, 1]], ref_logprobs=torch.tensor([[0.25, 0.5]]).log())
    objective = Objective(kl=KLTerm(estimator="k2", coef=0.1), aggregation="sequence_sum")
    losses = losses_of(torch.tensor([[0.5, 0.5]]).log(), batch, objective)
    assert losses.kl.flatten().tolist() == pytest.approx([math.log(2) ** 2 / 2, 0])
    assert losses.loss.item() == pytest.approx(0.1 * math.log(2) ** 2 / 2)


def test_without_a_reference_there_is_no_kl():
    assert losses_of([[0.0]], train_batch([1.0], [[1]]), Objective()).kl is None


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_entropy_bonus_is_a_mean_over_tokens_beside_every_aggregation(aggregation):
    batch = train_batch([0.0, 0.0], [[1, 1], [1, 0]])
    objective = Objective(aggregation=aggregation, entropy=EntropyTerm(coef=0.1))
    entropy = [[1.0, 2.0], [6.0, 100.0]]
    losses = losses_of(torch.zeros(2, 2), batch, objective, entropy, entropy_coef=0.1)
    assert losses.loss.item() == pytest.approx(-0.1 * 3)


def test_a_token_of_low_entropy_counts_but_has_neither_surrogate_nor_bonus():
    batch = train_batch([1.0], [[1, 1, 1, 0]], entropy_mask=[[False, True, True, False]])
    entropy = [[7.0, 1.0, 3.0, 9.0]]
    losses = losses_of(torch.zeros(1, 4), batch, UNCORRECTED, entropy, entropy_coef=0.1)
    assert losses.has_surrogate.tolist() == [[False, True, True, False]]
    assert losses.loss.item() == pytest.approx(-2 / 3 - 0.1 * (1 + 3) / 2)


def test_an_off_policy_sequence_of_negative_advantage_keeps_only_its_kl():
    # The sampler gave the first token 3 nats more than the policy does.
    logprobs = torch.tensor([[-4.0, -1.0]] * 2)
    batch = train_batch(
        [-1.0, 1.0],
        [[1, 1], [1, 1]],
        sampler_logprobs=torch.full((2, 2), -1.0),
        ref_logprobs=logprobs + 1,
    )
    objective = replace(UNCORRECTED, off_policy_threshold=1.0, kl=KLTerm(estimator="k2", coef=1.0))
    losses = losses_of(logprobs, batch, objective)
    assert losses.has_surrogate.tolist() == [[False, False], [True, True]]
    assert losses.loss.item() == pytest.approx((-1 - 1 + 4 * 0.5) / 4)


BOUNDED = [
    Objective(surrogate="clip", ratio_cap=3.0),
    Objective(surrogate="clip", ratio_cap=3.0, ratio="sequence"),
    Objective(surrogate="cispo"),
    Objective(surrogate="cispo", ratio="sequence"),
    Objective(surrogate="sapo"),
    Objective(surrogate="sapo", ratio="sequence"),
    Objective(surrogate="gmpo"),
    Objective(surrogate="vespo"),
    Objective(sampler_correction=SamplerCorrection(level="sequence"), ratio_cap=3.0),
    Objective(sampler_correction=SamplerCorrection(level="geometric", outside="mask")),
]


@pytest.mark.parametrize("objective", BOUNDED)
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_extreme_ratios_leave_loss_and_gradient_finite(objective, advantage):
    sign = torch.tensor([1.0, -1.0])
    logprobs = (-60 + 50 * sign.repeat(3, 4)).requires_grad_()  # [3, 8]
    far = torch.full((3, 8), -60.0)
    batch = train_batch(
        [advantage] * 3,
        [[1] * 8, [1, 0] * 4, [0, 1] * 4],  # both directions, up only, down only
        old_logprobs=far,
        sampler_logprobs=far - 50 * sign.flip(0).repeat(3, 4),
        ref_logprobs=far,
    )
    objective = replace(objective, kl=KLTerm(coef=1e-30), off_policy_threshold=0.1)
    loss = losses_of(logprobs, batch, objective).loss
    loss.backward()
    assert loss.isfinite()
    assert logprobs.grad.isfinite().all()


@pytest.mark.parametrize("objective", BOUNDED)
def test_a_micro_batch_without_tokens_has_no_loss_and_no_gradient(objective):
    logprobs = torch.full((2, 3), -60.0, requires_grad=True)
    entropy = torch.ones(2, 3, requires_grad=True)
    batch = train_batch([1.0, -1.0], torch.zeros(2, 3), ref_logprobs=torch.zeros(2, 3))
    objective = replace(objective, kl=KLTerm(coef=0.1))
    losses = token_losses(logprobs, entropy, batch, counts_of(batch), objective, entropy_coef=0.1)
    losses.loss.backward()
    assert losses.loss == 0
    assert logprobs.grad.eq(0).all()
    assert entropy.grad.eq(0).all()
