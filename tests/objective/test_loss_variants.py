"""Variants of the loss against loops over tokens that are written from their papers, in float64."""

import math
from dataclasses import replace

import pytest
import torch
from loss_batches import (  # noqa: F401 - the fixture applies by its import
    assert_same,
    counts_of,
    differentiate,
    double_precision,
    gradient_of,
    random_case,
)

from lit_grpo.objective import CovarianceTerm, KLTerm, Objective, SamplerMask, SFTTerm

SEEDS = range(20)


def case_of(seed: int, **fields):
    """Return a random case without a reference."""
    case = random_case(seed, num_rows=5, num_tokens=7, has_ref=False)
    return replace(case, batch=replace(case.batch, **fields))


def tokens_of(batch):
    """Yield row and position of every token in the loss."""
    yield from batch.loss_mask.nonzero().tolist()


def mean_over_tokens(batch, loss_of):
    return sum(loss_of(n, t) for n, t in tokens_of(batch)) / int(batch.loss_mask.sum())


def assert_is(case, objective, loss_of):
    """Assert that the loss is the mean over all tokens of ``loss_of(logprobs)(row, position)``."""
    expected = differentiate(case, lambda lp, _: mean_over_tokens(case.batch, loss_of(lp)))
    assert_same(gradient_of(case, objective, counts_of(case.batch)), expected)


def ratio(new, old):
    return torch.exp(new - old)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_masks_tokens_that_have_diverged_in_the_direction_of_their_advantage(divergence, seed):
    """arXiv 2602.04879, with the sampler as the policy that the trust region is around."""
    case, num_masked = case_of(seed), 0
    batch = case.batch
    low, high = (0.004, 0.006) if divergence == "tv" else (0.0004, 0.0006)

    def is_masked(new: float, old: float, advantage: float) -> bool:
        p, q = math.exp(new), math.exp(old)
        moved = abs(p - q)
        if divergence == "kl":
            moved = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        if advantage > 0:
            return p > q and moved > high
        return p <= q and moved > low

    def loss_of(logprobs):
        def of_token(n, t):
            nonlocal num_masked
            old, advantage = batch.sampler_logprobs[n, t], batch.advantages[n]
            masked = is_masked(float(logprobs[n, t].detach()), float(old), float(advantage))
            num_masked += masked
            return -(not masked) * ratio(logprobs[n, t], old) * advantage

        return of_token

    objective = Objective(
        surrogate="dppo",
        dppo_divergence=divergence,
        clip_low=low,
        clip_high=high,
        old_logprobs="sampler",
    )
    assert_is(case, objective, loss_of)
    assert 0 < num_masked < batch.loss_mask.sum()


@pytest.mark.parametrize("seed", SEEDS)
def test_with_the_sampler_as_the_old_policy_ratio_and_clip_are_against_it(seed):
    case = case_of(seed)
    batch = case.batch

    def loss_of(logprobs):
        def of_token(n, t):
            rho = ratio(logprobs[n, t], batch.sampler_logprobs[n, t])
            advantage = batch.advantages[n]
            return -torch.minimum(rho * advantage, rho.clamp(0.8, 1.2) * advantage)

        return of_token

    assert_is(case, Objective(old_logprobs="sampler"), loss_of)


def statistics_of(batch, n, kind, policy):
    """Return the values of a row's tokens that a mask compares."""
    logs = [
        float(policy[n, t] - batch.sampler_logprobs[n, t]) for m, t in tokens_of(batch) if m == n
    ]
    if kind == "k2":
        return [x**2 / 2 for x in logs]
    return [math.exp(x) - 1 - x for x in logs] if kind == "k3" else logs


@pytest.mark.parametrize("seed", SEEDS[:8])
@pytest.mark.parametrize("over", ["token", "sum", "mean", "maximum"])
@pytest.mark.parametrize(
    ("statistic", "low", "high"), [("ratio", 0.8, 1.3), ("k2", None, 0.1), ("k3", None, 0.1)]
)
def test_sampler_masks_drop_what_lies_outside_their_bounds(statistic, low, high, over, seed):
    case = case_of(seed)
    batch = case.batch

    def keeps(n, t):
        values = statistics_of(batch, n, statistic, batch.old_logprobs)
        mine = [position for m, position in tokens_of(batch) if m == n].index(t)
        value = {
            "token": values[mine],
            "sum": sum(values),
            "mean": sum(values) / len(values),
            "maximum": max(values),
        }[over]
        value = math.exp(value) if statistic == "ratio" else value
        return (low or 0.0) <= value <= high

    def loss_of(logprobs):
        def of_token(n, t):
            rho, advantage = ratio(logprobs[n, t], batch.old_logprobs[n, t]), batch.advantages[n]
            loss = -torch.minimum(rho * advantage, rho.clamp(0.8, 1.2) * advantage)
            weight = ratio(batch.old_logprobs[n, t], batch.sampler_logprobs[n, t]).clamp(max=2)
            return keeps(n, t) * weight * loss

        return of_token

    mask = SamplerMask(statistic=statistic, over=over, min=low, max=high)
    assert_is(case, Objective(sampler_masks=[mask]), loss_of)


def test_several_sampler_masks_keep_what_each_of_them_keeps():
    case = case_of(3)
    masks = [
        SamplerMask(over="token", min=0.7, max=1.5),
        SamplerMask(statistic="k2", over="maximum", max=0.4),
    ]
    counts = counts_of(case.batch)
    both = gradient_of(case, Objective(sampler_masks=masks), counts).logprobs != 0
    each = [gradient_of(case, Objective(sampler_masks=[m]), counts).logprobs != 0 for m in masks]
    assert both.equal(each[0] & each[1])
    assert not both.equal(each[0])
    assert not both.equal(each[1])


@pytest.mark.parametrize("seed", SEEDS)
def test_kl_cov_adds_the_absolute_log_ratio_of_the_chosen_tokens(seed):
    """arXiv 2505.22617 equation 12: their loss has no clip."""
    chosen = torch.rand(5, 7, generator=torch.Generator().manual_seed(seed)) < 0.3
    case = case_of(seed, covariance_mask=chosen)
    batch = case.batch

    def loss_of(logprobs):
        def of_token(n, t):
            difference = logprobs[n, t] - batch.old_logprobs[n, t]
            loss = -difference.exp() * batch.advantages[n]
            return loss + 0.7 * difference.abs() * chosen[n, t]

        return of_token

    objective = Objective(
        clip_low=1.0,
        clip_high=math.inf,
        sampler_correction=None,
        covariance=CovarianceTerm(action="kl", coef=0.7),
    )
    assert_is(case, objective, loss_of)


@pytest.mark.parametrize("seed", SEEDS)
def test_clip_cov_removes_the_surrogate_of_the_chosen_tokens(seed):
    """arXiv 2505.22617 equation 11, on top of the clip."""
    chosen = torch.rand(5, 7, generator=torch.Generator().manual_seed(seed)) < 0.3
    case = case_of(seed, covariance_mask=chosen)
    batch = case.batch

    def loss_of(logprobs):
        def of_token(n, t):
            rho, advantage = ratio(logprobs[n, t], batch.old_logprobs[n, t]), batch.advantages[n]
            clipped = torch.minimum(rho * advantage, rho.clamp(0.8, 1.2) * advantage)
            return -clipped * (not chosen[n, t])

        return of_token

    objective = Objective(sampler_correction=None, covariance=CovarianceTerm())
    assert_is(case, objective, loss_of)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_likelihood_of_good_completions_is_a_mean_over_their_tokens(seed):
    """VAPO, arXiv 2504.05118 equation 8, here without any surrogate."""
    is_good = torch.tensor([True, False, True, True, False])
    case = case_of(seed, is_good=is_good, advantages=torch.zeros(5))
    tokens = [(n, t) for n, t in tokens_of(case.batch) if is_good[n]]

    def loss(logprobs, _):
        return -0.1 * sum(logprobs[n, t] for n, t in tokens) / len(tokens)

    objective = Objective(aggregation="sequence", sft=SFTTerm(coef=0.1))
    ours = gradient_of(case, objective, counts_of(case.batch))
    assert_same(ours, differentiate(case, loss))


@pytest.mark.parametrize("seed", SEEDS)
def test_an_advantage_may_differ_from_token_to_token(seed):
    advantages = torch.randn(5, 7, generator=torch.Generator().manual_seed(seed))
    case = case_of(seed, advantages=advantages)
    batch = case.batch

    def loss_of(logprobs):
        def of_token(n, t):
            rho, advantage = ratio(logprobs[n, t], batch.old_logprobs[n, t]), advantages[n, t]
            return -torch.minimum(rho * advantage, rho.clamp(0.8, 1.2) * advantage)

        return of_token

    assert_is(case, Objective(sampler_correction=None), loss_of)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_importance_of_the_kl_is_the_policy_over_the_sampler(estimator, seed):
    case = random_case(seed, num_rows=5, num_tokens=7)
    batch = replace(case.batch, advantages=torch.zeros(5))
    case = replace(case, batch=batch)

    def loss_of(logprobs):
        def of_token(n, t):
            x = logprobs[n, t] - batch.ref_logprobs[n, t]
            kl = x if estimator == "k1" else torch.exp(-x) - 1 + x
            return 0.3 * kl * ratio(logprobs[n, t], batch.sampler_logprobs[n, t])

        return of_token

    assert_is(case, Objective(kl=KLTerm(coef=0.3, estimator=estimator, importance=True)), loss_of)
