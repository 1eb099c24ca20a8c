"""KL estimators: their values, and their expected gradients summed over a small vocabulary."""

import math

import pytest
import torch

from lit_grpo.objective import KLTerm
from lit_grpo.objective.kl import (
    KL_ESTIMATORS,
    KLControl,
    kl_in_loss,
    kl_in_reward,
    straight_through_k2,
)

LOGITS = torch.tensor([0.3, -1.2, 2.0, 0.0, 0.7], dtype=torch.float64)
REFERENCE = torch.tensor([1.0, 0.2, -0.4, 0.0, -1.5], dtype=torch.float64).log_softmax(0)
SAMPLED_FROM = torch.tensor([0.0, 1.0, 1.0, -2.0, 0.5], dtype=torch.float64).log_softmax(0)


def gradient_of(divergence) -> torch.Tensor:
    """Differentiate a function of the policy's log-probabilities with respect to its logits."""
    logits = LOGITS.clone().requires_grad_()
    return torch.autograd.grad(divergence(logits.log_softmax(0)), logits)[0]


def expected_gradient(term: KLTerm, sampled_from: torch.Tensor | None = None) -> torch.Tensor:
    """Average the gradient of the term over tokens drawn from the policy or another one."""

    def expectation(logprobs: torch.Tensor) -> torch.Tensor:
        drawn_from = logprobs.detach() if sampled_from is None else sampled_from
        values = kl_in_loss(logprobs, REFERENCE, drawn_from, term)
        return (drawn_from.exp() * values).sum()

    return gradient_of(expectation)


REVERSE = gradient_of(lambda logprobs: (logprobs.exp() * (logprobs - REFERENCE)).sum())
FORWARD = gradient_of(lambda logprobs: (REFERENCE.exp() * (REFERENCE - logprobs)).sum())


def test_estimators_match_their_formulas():
    logprobs, ref = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    assert KL_ESTIMATORS["k1"](logprobs, ref).item() == pytest.approx(math.log(2))
    assert KL_ESTIMATORS["k2"](logprobs, ref).item() == pytest.approx(math.log(2) ** 2 / 2)
    assert KL_ESTIMATORS["k3"](logprobs, ref).item() == pytest.approx(0.5 + math.log(2) - 1)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased_for_the_divergence(estimator):
    logprobs = LOGITS.log_softmax(0)
    divergence = (logprobs.exp() * (logprobs - REFERENCE)).sum().item()
    values = KL_ESTIMATORS[estimator](logprobs, REFERENCE)
    assert (logprobs.exp() * values).sum().item() == pytest.approx(divergence)


@pytest.mark.parametrize(
    ("estimator", "expected"), [("k1", 0 * REVERSE), ("k2", REVERSE), ("k3", FORWARD)]
)
def test_expected_gradient_of_an_estimator_in_the_loss(estimator, expected):
    torch.testing.assert_close(expected_gradient(KLTerm(estimator=estimator)), expected)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_straight_through_has_the_value_of_the_estimator_and_the_gradient_of_the_divergence(
    estimator,
):
    logprobs = LOGITS.log_softmax(0)
    value = KL_ESTIMATORS[estimator](logprobs, REFERENCE)
    torch.testing.assert_close(straight_through_k2(value, logprobs, REFERENCE), value)
    term = KLTerm(estimator=estimator, gradient="k2")
    torch.testing.assert_close(expected_gradient(term), REVERSE)


@pytest.mark.parametrize("sampled_from", [None, SAMPLED_FROM])
@pytest.mark.parametrize(
    "term",
    [
        KLTerm(estimator="k1", importance=True),
        KLTerm(estimator="k3", importance=True),
        KLTerm(estimator="k1", importance=True, gradient="k2"),
        KLTerm(estimator="k2", importance=True, gradient="k2"),
        KLTerm(estimator="k3", importance=True, gradient="k2"),
    ],
)
def test_with_importance_the_gradient_is_that_of_the_divergence_for_tokens_of_any_policy(
    term, sampled_from
):
    torch.testing.assert_close(expected_gradient(term, sampled_from), REVERSE)


def test_importance_multiplies_the_value_by_the_ratio_of_the_policy_over_the_sampler():
    logprobs, ref = torch.tensor([[math.log(0.6)]]), torch.tensor([[math.log(0.3)]])
    sampler = torch.tensor([[math.log(0.2)]])
    for gradient in ("estimator", "k2"):
        term = KLTerm(estimator="k1", importance=True, gradient=gradient)
        value = kl_in_loss(logprobs, ref, sampler, term).item()
        assert value == pytest.approx(3 * math.log(2))


def test_kl_in_reward_is_that_of_the_tokens_in_the_mask():
    logprobs = torch.tensor([[-1.0, -2.0, -9.0], [-1.0, -1.0, -1.0]])
    ref = torch.tensor([[-2.0, -4.0, -1.0], [-0.5, -1.0, -1.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
    term = KLTerm(estimator="k1", coef=0.1, place="reward")
    assert kl_in_reward(logprobs, ref, mask, term).tolist() == [[1.0, 2.0, 0.0], [-0.5, 0.0, 0.0]]


def test_the_coefficient_follows_the_divergence_to_its_target():
    """arXiv 1909.08593 section 2.2: by at most a fifth of the share of the horizon."""
    control = KLControl(term=KLTerm(coef=0.1, target=0.05, horizon=1000), coef=0.1)
    assert control.after_step(0.055, 100).coef == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    assert control.after_step(0.0475, 100).coef == pytest.approx(0.1 * (1 - 0.05 * 0.1))
    assert control.after_step(7.0, 100).coef == pytest.approx(0.1 * (1 + 0.2 * 0.1))
    assert control.after_step(0.0, 100).coef == pytest.approx(0.1 * (1 - 0.2 * 0.1))
    fixed = KLControl(term=KLTerm(coef=0.1), coef=0.1)
    assert fixed.after_step(7.0, 100) == fixed
