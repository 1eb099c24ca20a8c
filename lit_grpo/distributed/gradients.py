"""Norms of gradients, which may be sharded over the ranks."""

from __future__ import annotations

from collections.abc import Sequence

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
