import math

import pytest
import torch

from lit_grpo.objective.ratios import (
    MAX_LOG_RATIO,
    bounded,
    sequence_mean,
    sequence_ratio,
    token_ratio,
)

MASK = torch.tensor([[True, False, True], [True, True, True], [False, False, False]])


def test_a_log_ratio_out_of_bounds_is_the_bound_and_has_no_gradient():
    log_ratio = torch.tensor([-30.0, -20.0, 1.5, 25.0], requires_grad=True)
    inside = bounded(log_ratio)
    assert inside.tolist() == [-MAX_LOG_RATIO, -20.0, 1.5, MAX_LOG_RATIO]
    inside.sum().backward()
    assert log_ratio.grad[[0, 2, 3]].tolist() == [0, 1, 0]


def test_the_mean_of_a_sequence_is_that_of_its_tokens_in_the_mask():
    values = torch.tensor([[1.0, 50.0, 3.0], [1.0, 2.0, 6.0], [7.0, 8.0, 9.0]])
    assert sequence_mean(values, MASK).tolist() == [[2.0], [3.0], [0.0]]


def test_every_token_has_its_own_ratio():
    ratios = torch.tensor([[2.0, 0.5, 1.0]])
    assert token_ratio(ratios.log(), MASK[:1]).flatten().tolist() == pytest.approx([2.0, 0.5, 1.0])


def test_the_ratio_of_a_sequence_is_the_geometric_mean_of_its_tokens():
    ratios = torch.tensor([[2.0, 100.0, 8.0], [1.0, 3.0, 9.0], [5.0, 5.0, 5.0]])
    found = sequence_ratio(ratios.log(), MASK)
    assert found.flatten().tolist() == pytest.approx([4.0, 3.0, 1.0])


def test_the_ratio_of_a_sequence_passes_the_mean_gradient_to_its_tokens():
    log_ratio = torch.full((1, 3), math.log(2), requires_grad=True)
    sequence_ratio(log_ratio, MASK[:1]).sum().backward()
    assert log_ratio.grad.flatten().tolist() == pytest.approx([1.0, 0.0, 1.0])
