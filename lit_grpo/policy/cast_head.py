"""Cast the weight of a head once for all chunks of tokens, under autocast.

Lightning runs autocast without its cache, so a weight in float32 is cast again whenever it is
used: for each chunk in the forward pass and again where the chunk is recomputed. With the cache the
gradients of all chunks would be added in 16 bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear


def cast_weight(head: nn.Module) -> Tensor | None:
    """Return the weight in the type in which autocast computes; None if the head is to be called.

    That is where nothing is cast, and where the head does more than a product with its weight: for
    a bias or an adapter.
    """
    if type(head) is not nn.Linear or type(head.weight) is not nn.Parameter:
        return None
    device_type = head.weight.device.type
    has_autocast = torch.amp.is_autocast_available(device_type)
    if not (has_autocast and torch.is_autocast_enabled(device_type)) or head.bias is not None:
        return None
    dtype = torch.get_autocast_dtype(device_type)
    if head.weight.dtype != torch.float32 or dtype == torch.float32:
        return None
    return head.weight.detach().to(dtype)


def cast_linear(hidden_states: Tensor, head: nn.Module, cast: Tensor) -> Tensor:
    """Return hidden_states @ cast.T, whose gradient flows to the weight of the head in float32.

    Args:
        cast: What `cast_weight` has returned for the head.
    """
    assert isinstance(head, nn.Linear)
    product: Any = _CastLinear.apply  # torch does not annotate it
    logits: Tensor = product(hidden_states.to(cast.dtype), head.weight, cast)
    return logits


class _CastLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, weight: Tensor, cast: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_states, cast)
        ctx.dtype = weight.dtype
        return linear(hidden_states, cast)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden_states, cast = ctx.saved_tensors
        needs_states, needs_weight, _ = ctx.needs_input_grad
        of_states = grad @ cast if needs_states else None
        of_weight = (grad.t() @ hidden_states).to(ctx.dtype) if needs_weight else None
        return of_states, of_weight, None
