"""The interface for spreading a policy over the ranks; by default each rank has all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

T = TypeVar("T")


class Sharding:
    """Keep the whole model on every rank, as on one device and under DDP.

    A strategy that shards the model overrides what it does differently.
    """

    is_sharded = False
    """Whether a forward pass is collective: then every rank must make equally many."""

    loads_parts = False
    """Whether a model can be sharded before it has weights: then each rank reads only its parts."""

    device = "cpu"
    """Type of the device that the shards are on."""

    def shard(self, model: Any) -> None:
        """Shard a ``transformers`` model in place; every rank must call this."""

    def run(self, model: Any, function: Callable[[], T]) -> T:
        """Call a function that uses parts of the model, whose weights are then whole.

        The backward pass of its result also works.
        """
        return function()

    def run_part(self, part: nn.Module, function: Callable[[Tensor], T], states: Tensor) -> T:
        """Call a function instead of the forward pass of a part, whose weights are then whole.

        They are collected once, and once in the backward pass. In what the function returns at
        most one tensor may carry a gradient.
        """
        return function(states)

    def compiled(self, body: Any) -> Callable[..., Any]:
        """Return the forward pass of a model's body, run through ``torch.compile``."""
        return torch.compile(body, dynamic=True)

    def gathered(self, model: Any) -> AbstractContextManager[None]:
        """Keep all weights whole within the context, for many forward passes without gradients."""
        return nullcontext()

    def gathered_bytes(self, model: Any) -> int:
        """Return the bytes that `gathered` needs on each rank in addition to its parts."""
        return 0


UNSHARDED = Sharding()
"""Every rank has the whole model."""


def is_partitioned(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter that ZeRO-3 has partitioned, and may be empty here."""
    return hasattr(tensor, "ds_id")


def whole(tensors: Sequence[Tensor], *, are_written: bool = False) -> AbstractContextManager[Any]:
    """Keep those that ZeRO-3 has partitioned whole within the context; every rank must enter it.

    Args:
        are_written: Whether every rank writes the same to them.
    """
    partitioned = [one for one in tensors if is_partitioned(one)]
    if not partitioned:
        return nullcontext()
    from deepspeed.runtime.zero import GatheredParameters

    context: AbstractContextManager[Any] = GatheredParameters(
        partitioned, modifier_rank=0 if are_written else None
    )
    return context


def layers_of(model: Any) -> list[nn.Module]:
    """Return the layers of a ``transformers`` model that no sharding splits further."""
    names = set(model._no_split_modules or ())
    return [part for part in model.modules() if type(part).__name__ in names]


def is_divided(model: nn.Module) -> bool:
    """Return whether each rank has only a part of some weight."""
    return any(isinstance(one, DTensor) or is_partitioned(one) for one in model.parameters())


@contextmanager
def refused_passes(model: nn.Module, error: Exception) -> Iterator[None]:
    """Raise the error instead of a forward pass of the model, or of a part, within the context."""

    def refuse(*_: Any) -> None:
        raise error

    # First: hooks that gather weights would wait for the other ranks.
    parts = model.modules()
    hooks = [part.register_forward_pre_hook(refuse, prepend=True) for part in parts]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def whole_shape(tensor: Tensor) -> torch.Size:
    """Return the shape of a tensor when it is whole."""
    shape: torch.Size = getattr(tensor, "ds_shape", tensor.shape)
    return shape


def compute_device(model: nn.Module) -> torch.device:
    """Return the device on which a model computes; its shards may be in host memory."""
    weight = next(model.parameters())
    if isinstance(weight, DTensor) and (kind := weight.device_mesh.device_type) != "cpu":
        return torch.device(kind, torch.get_device_module(kind).current_device())
    return weight.device
