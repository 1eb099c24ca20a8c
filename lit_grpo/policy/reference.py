"""The frozen reference of a policy: a copy of the model, or of the values of its adapter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import nn
from transformers import PreTrainedModel

from lit_grpo.policy.files.shard_loading import copy_without_weights
from lit_grpo.policy.sharding import whole


def frozen_copy(model: PreTrainedModel, *, has_weights: bool) -> PreTrainedModel:
    """Copy a model, or only its structure if its weights will be copied in parts."""
    copied = deepcopy(model) if has_weights else copy_without_weights(model)
    copied.requires_grad_(False)
    return copied


def frozen_values(parameters: Iterable[nn.Parameter]) -> nn.Module:
    """Copy parameters to buffers, which are saved in checkpoints but not optimized."""
    copies = nn.Module()
    for number, parameter in enumerate(parameters):
        with whole([parameter]):
            copies.register_buffer(str(number), parameter.detach().clone())
    return copies


@torch.no_grad()
def move_towards(
    policy: Iterable[torch.Tensor], reference: Iterable[torch.Tensor], mix: float
) -> None:
    """Set each tensor of the reference to ``mix * policy + (1 - mix) * reference``."""
    for target, current in zip(reference, policy, strict=True):
        with whole([current]), whole([target], are_written=True):
            target.lerp_(current, mix)


@contextmanager
def swapped(parameters: Iterable[nn.Parameter], others: nn.Module) -> Iterator[None]:
    """Swap the values of parameters with a module's buffers within the context."""
    parameters = [*parameters]

    @torch.no_grad()
    def swap() -> None:
        for parameter, other in zip(parameters, others.buffers(), strict=True):
            with whole([parameter], are_written=True):
                value = parameter.clone()  # swapped storage would miss the shards that FSDP keeps
                parameter.copy_(other)
                other.copy_(value)

    swap()
    try:
        yield
    finally:
        swap()
