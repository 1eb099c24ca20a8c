"""Optimizer steps on clipped gradients, which may be sharded over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def clip_grad_norm(parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
    """Scale the gradient down to at most a norm; return the norm that it had, over all ranks.

    With sharded parameters every rank must call this.
    """
    return _whole(torch.nn.utils.clip_grad_norm_(parameters, max_norm))


def grad_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the norm of the gradient; with sharded parameters every rank must call this."""
    gradients = [one.grad for one in parameters if one.grad is not None]
    return _whole(torch.nn.utils.get_total_norm(gradients))


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


class OptimizerSteps:
    """Clip the gradient, and then take the step.

    A strategy that does this otherwise has an attribute ``steps`` that overrides everything here.
    """

    def take(
        self, optimizer: Any, parameters: Sequence[nn.Parameter], max_norm: float
    ) -> tuple[Tensor, bool]:
        """Take a step on the gradient, scaled down to at most a norm.

        Every rank must call this.

        Returns:
            The norm before, and whether it is finite; if not, the step is left out.
        """
        norm = clip_grad_norm(parameters, max_norm)
        is_finite = bool(norm.isfinite())  # the one wait for a GPU
        if is_finite:
            optimizer.step()
        return norm, is_finite

    def norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Return the norm of the gradient of the step that is being taken."""
        return grad_norm(parameters)


STEPS = OptimizerSteps()
"""Each rank has the gradients, or its shards of them, in the parameters."""


def steps_of(strategy: Any) -> OptimizerSteps:
    """Return how a strategy takes optimizer steps."""
    steps: OptimizerSteps = getattr(strategy, "steps", STEPS)
    return steps
