"""Weights in oneDNN's blocked layout, for sampling on a CPU.

A product of few rows reads every weight once, and much of its time goes into bringing them into
the order in which the kernel needs them. The weights do not change during a rollout, so this is
done once for all of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any, Final

import torch
from torch import Tensor, nn

MIN_WEIGHTS: Final = 2**18
"""Weights of a layer from which its products gain more than another call of them costs."""


class BlockedWeights:
    """Blocked copies of the large linear weights of a model, in float32 on a CPU.

    Other layers are left as they are.
    """

    def __init__(self, model: nn.Module) -> None:
        with _LOCK:
            layers = [layer for layer in model.modules() if _gains(layer)]
        self._forwards = [(vars(layer), _blocked_forward(layer)) for layer in layers]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let the layers of the model multiply with these copies, except under autocast.

        Their weights must be those that were copied, and no gradient is computed.
        """
        if not self._forwards or torch.is_autocast_enabled("cpu"):
            yield
            return
        with _LOCK:  # another thread's forward pass of the same model may end before this one
            try:
                for attributes, forward in self._forwards:
                    attributes["forward"] = forward
                yield
            finally:
                for attributes, _ in self._forwards:
                    attributes.pop("forward", None)


_LOCK = Lock()


def _gains(layer: nn.Module) -> bool:
    """Return whether a layer is a plain linear one that multiplies faster with a blocked copy."""
    if not is_large_linear(layer) or "forward" in vars(layer):
        return False
    weight: Any = layer.weight
    is_whole = type(weight) is nn.Parameter and weight.dim() == 2  # not a shard
    is_float32 = weight.device.type == "cpu" and weight.dtype == torch.float32
    return is_whole and is_float32 and _is_available()


def is_large_linear(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear and layer.weight.numel() >= MIN_WEIGHTS


def _blocked_forward(layer: Any) -> Callable[[Tensor], Tensor]:
    with torch.no_grad():
        weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight)
    bias = None if layer.bias is None else layer.bias.detach()
    return lambda input: _product(input, weight, bias)


def _product(input: Tensor, blocked: Tensor, bias: Tensor | None) -> Tensor:
    """Return [..., O] products of [..., I] rows with blocked weights [O, I]."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(input, blocked, bias, "none", [], "")
    return product


@cache
def _is_available() -> bool:
    """Return whether this build of torch has oneDNN's products, and they are right."""
    if not torch.backends.mkldnn.is_available():
        return False
    input, weight = torch.eye(3, 4), torch.arange(8.0).view(2, 4)
    try:
        product = _product(input, torch.ops.mkldnn._reorder_linear_weight(weight), None)
    except (AttributeError, RuntimeError, TypeError):  # not public: it may be missing or differ
        return False
    return torch.equal(product, input @ weight.T)
