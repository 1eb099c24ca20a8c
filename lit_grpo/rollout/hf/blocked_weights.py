"""Weights in oneDNN's blocked layout, for sampling on a CPU.

With few rows, a large part of a product's time is spent reordering the weights for the kernel. The
weights do not change while rows are sampled, so they are reordered once for all of their tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from threading import RLock
from typing import Any, Final, TypeGuard

import torch
from torch import Tensor, nn

MIN_WEIGHTS: Final = 2**18
"""Fewest weights of a layer for which the faster product outweighs the extra call."""
MIN_TOKENS: Final = 32
"""Fewest sampled tokens for which copying the weights pays off."""
MAX_ROWS: Final = 512
"""Most rows for which blocked products are clearly faster than torch's own."""


class BlockedWeights:
    """Blocked copies of the large linear weights of a model, in float32 on a CPU.

    Other layers are left as they are.

    Args:
        num_tokens: The most tokens that are sampled with them; no copies are made for few.
    """

    def __init__(self, model: nn.Module, num_tokens: int) -> None:
        self._forwards: list[_BlockedForward] = []
        if num_tokens >= MIN_TOKENS and not torch.is_autocast_enabled("cpu"):
            with _LOCK:
                layers = [layer for layer in model.modules() if _can_be_copied(layer)]
            self._forwards = [_BlockedForward(layer) for layer in layers]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let the layers of the model multiply with these copies, for one forward pass."""
        if not self._forwards:
            yield
            return
        with _LOCK:  # another thread's forward pass of the same model may end before this one
            try:
                for forward in self._forwards:
                    vars(forward.layer)["forward"] = forward
                yield
            finally:
                for forward in self._forwards:
                    vars(forward.layer).pop("forward", None)


_LOCK = RLock()


class _BlockedForward:
    """The forward pass of a linear layer, with a copy of its weights as they are now.

    It falls back to the layer's own if gradients or autocast are on, for more than `MAX_ROWS` rows,
    and once the weights have changed.
    """

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer
        self._state = _state(layer)
        with torch.no_grad():
            self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(layer.weight)

    def __call__(self, input: Tensor) -> Tensor:
        layer, rows = self.layer, input.numel() // self.layer.in_features
        casts = input.dtype != torch.float32 or torch.is_autocast_enabled("cpu")
        falls_back = casts or torch.is_grad_enabled() or self._state != _state(layer)
        if falls_back or not 0 < rows <= MAX_ROWS or input.shape[-1] != layer.in_features:
            return nn.Linear.forward(layer, input)
        if (size := _size(rows)) == rows:
            return _product(input, self._weight, layer.bias)
        padded = nn.functional.pad(input.reshape(rows, -1), (0, 0, 0, size - rows))
        product = _product(padded, self._weight, layer.bias)
        return product[:rows].view(*input.shape[:-1], -1)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy as the layer's own forward pass: a copied layer has other weights."""
        return partial, (nn.Linear.forward, self.layer)


def _state(layer: nn.Linear) -> tuple[int, int]:
    """Return a key that changes when the weights of a layer are changed or replaced."""
    return layer.weight.data_ptr(), layer.weight._version


def _size(rows: int) -> int:
    """Round a number of rows up, since oneDNN keeps 0.65 MiB of code for each."""
    step = 1 if rows <= 16 else 8 if rows <= 64 else 16 if rows <= 256 else 64
    return -(-rows // step) * step


def _product(input: Tensor, blocked: Tensor, bias: Tensor | None) -> Tensor:
    """Return [..., O] products of [..., I] rows with blocked weights [O, I]."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(input, blocked, bias, "none", [], "")
    return product


def is_large_linear(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a layer is a large linear one, and torch has blocked products."""
    return type(layer) is nn.Linear and layer.weight.numel() >= MIN_WEIGHTS and is_available()


def _can_be_copied(layer: nn.Module) -> TypeGuard[nn.Linear]:
    if not is_large_linear(layer) or "forward" in vars(layer) or not torch.backends.mkldnn.enabled:
        return False
    tensors: list[Any] = [layer.weight] if layer.bias is None else [layer.weight, layer.bias]
    is_whole = tensors[0].dim() == 2  # not a shard
    return is_whole and all(
        type(one) is nn.Parameter
        and one.device.type == "cpu"
        and one.dtype == torch.float32
        and one.is_contiguous()
        and not one.is_inference()  # has no version that tells a change
        for one in tensors
    )


@cache
def is_available() -> bool:
    """Return whether this build of torch has oneDNN's products, and whether they are right."""
    if not torch.backends.mkldnn.is_available():
        return False
    make = partial(torch.eye, device="cpu", dtype=torch.float32)
    input, weight = make(3, 4), make(2, 4)
    try:
        with torch.no_grad():
            product = _product(input, torch.ops.mkldnn._reorder_linear_weight(weight), None)
    except (AttributeError, RuntimeError, TypeError):  # not public: it may be missing or differ
        return False
    return torch.equal(product, make(3, 2))
