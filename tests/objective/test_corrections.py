"""Sampler weights, and the masks of off-policy sequences and of tokens of low entropy."""

import pytest
import torch

from lit_grpo.objective import SamplerCorrection
from lit_grpo.objective.corrections import (
    entropy_threshold,
    passes_off_policy_mask,
    sampler_weights,
    top_entropy_tokens,
)

# Ratios 2, 8 in the first row, 1/2, 1/2 in the second; 100 is outside the mask.
LOG_RATIO = torch.tensor([[2.0, 100.0, 8.0], [0.5, 0.5, 100.0]]).log()
MASK = torch.tensor([[1, 0, 1], [1, 1, 0]]).bool()


@pytest.mark.parametrize(
    ("level", "outside", "low", "high", "expected"),
    [
        ("token", "truncate", None, 4.0, [[2, 1, 4], [0.5, 0.5, 1]]),
        ("token", "truncate", 0.75, None, [[2, 1, 8], [0.75, 0.75, 1]]),
        ("token", "mask", 0.75, 4.0, [[2, 1, 0], [0, 0, 1]]),
        ("sequence", "truncate", None, 10.0, [[10], [0.25]]),
        ("sequence", "truncate", 0.75, None, [[16], [0.75]]),
        ("sequence", "mask", None, 10.0, [[0], [0.25]]),
        ("sequence", "mask", 0.75, None, [[16], [0]]),
        ("geometric", "truncate", None, 10.0, [[4], [0.5]]),
        ("geometric", "truncate", 0.75, 3.0, [[3], [0.75]]),
        ("geometric", "mask", 0.75, 10.0, [[4], [0]]),
        ("token", "mask", None, None, [[2, 1, 8], [0.5, 0.5, 1]]),
    ],
)
def test_sampler_weights_are_bounded_at_their_level(level, outside, low, high, expected):
    correction = SamplerCorrection(level=level, outside=outside, min_ratio=low, max_ratio=high)
    weights = sampler_weights(LOG_RATIO, MASK, correction)
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=weights.dtype))


def test_a_ratio_at_a_bound_is_inside():
    correction = SamplerCorrection(outside="mask", min_ratio=0.5, max_ratio=1.0)
    weights = sampler_weights(torch.tensor([[0.5, 1.0]]).log(), torch.ones(1, 2).bool(), correction)
    assert weights.tolist() == [[0.5, 1.0]]


def test_sampler_weights_have_no_gradient():
    log_ratio = LOG_RATIO.clone().requires_grad_()
    assert not sampler_weights(log_ratio, MASK, SamplerCorrection()).requires_grad


def test_off_policy_rows_have_a_negative_advantage_and_a_policy_far_from_the_sampler():
    # Means over the masked tokens of log(sampler / policy): 0.6, 0.4, 0.6.
    log_ratio = torch.tensor([[-1.0, -0.2, -50.0], [-0.6, -0.2, -50.0], [-1.0, -0.2, 50.0]])
    mask = torch.tensor([[1, 1, 0]] * 3).bool()
    advantages = torch.tensor([[-1.0], [-1.0], [0.0]])
    kept = passes_off_policy_mask(log_ratio, advantages, mask, 0.5)
    assert kept.tolist() == [[False], [True], [True]]


def test_the_given_fraction_of_tokens_with_the_highest_entropy_is_kept():
    entropy = torch.tensor([[0.1, 0.9, 0.5], [0.7, 0.3, 99.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
    threshold = entropy_threshold(entropy[mask], 0.5)  # the median of five
    assert threshold == pytest.approx(0.5, abs=2e-5)
    kept = top_entropy_tokens(entropy, mask, threshold)
    assert kept.tolist() == [[False, True, True], [True, False, False]]


def test_entropies_that_differ_by_rounding_are_kept_together():
    entropy = torch.tensor([[1.0, 1.0 - 6e-8, 1.0 + 1.2e-7, 0.5]])
    mask = torch.ones(1, 4).bool()
    kept = top_entropy_tokens(entropy, mask, entropy_threshold(entropy[mask], 0.3))
    assert kept.tolist() == [[True, True, True, False]]


@pytest.mark.parametrize("fraction", [0.2, 0.25, 0.9, 1.0])
def test_entropy_threshold_is_a_quantile(fraction):
    entropies = torch.rand(101, generator=torch.Generator().manual_seed(0))
    expected = entropies.double().quantile(1 - fraction).item()
    assert entropy_threshold(entropies, fraction) == pytest.approx(expected, abs=2e-5)


def test_entropy_threshold_takes_more_than_sixteen_million_tokens():
    num_tokens = 2**24 + 1
    threshold = entropy_threshold(torch.linspace(0, 1, num_tokens), 0.25)
    assert threshold == pytest.approx(0.75, abs=2e-5)


def test_a_batch_without_tokens_keeps_none():
    empty = torch.zeros(1, 2)
    threshold = entropy_threshold(empty[empty > 0], 0.2)
    assert not top_entropy_tokens(empty, empty > 0, threshold).any()
