"""Gradients of one process; `tests/end_to_end/test_sharded.py` has those of shards."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lit_grpo.distributed.gradients import (
    STEPS,
    OptimizerSteps,
    clip_grad_norm,
    grad_norm,
    steps_of,
)


def parameters(*gradients: float | None) -> list[nn.Parameter]:
    """Return parameters of one value, 1, with these gradients."""
    made = [nn.Parameter(torch.ones(1)) for _ in gradients]
    for parameter, gradient in zip(made, gradients, strict=True):
        parameter.grad = None if gradient is None else torch.tensor([gradient])
    return made


@pytest.mark.parametrize(
    ("max_norm", "expected"), [(1.0, [0.6, 0.8]), (10.0, [3.0, 4.0])], ids=["above", "below"]
)
def test_a_gradient_is_scaled_down_to_the_norm_and_never_up(max_norm, expected):
    given = parameters(3.0, 4.0)
    assert clip_grad_norm(given, max_norm).item() == 5
    assert [one.grad.item() for one in given] == pytest.approx(expected, abs=1e-5)


def test_the_norm_is_over_all_parameters_with_a_gradient():
    assert grad_norm(parameters(3.0, None, 4.0)).item() == 5


def test_a_step_is_taken_on_the_clipped_gradient():
    given = parameters(3.0, 4.0)
    norm, is_finite = STEPS.take(torch.optim.SGD(given, lr=1.0), given, 1.0)
    assert (norm.item(), is_finite) == (5, True)
    assert [one.item() for one in given] == pytest.approx([0.4, 0.2], abs=1e-5)


@pytest.mark.parametrize("gradient", [math.nan, math.inf])
def test_a_step_on_a_gradient_that_is_not_finite_is_left_out(gradient):
    given = parameters(gradient, 4.0)
    _, is_finite = STEPS.take(torch.optim.SGD(given, lr=1.0), given, 1.0)
    assert not is_finite
    assert [one.item() for one in given] == [1.0, 1.0]


def test_a_strategy_may_take_the_steps_itself():
    own = OptimizerSteps()
    assert steps_of(SimpleNamespace(steps=own)) is own
    assert steps_of(SimpleNamespace()) is STEPS
