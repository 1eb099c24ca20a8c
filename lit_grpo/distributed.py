"""What the ranks of a run must know of each other within a rollout step. Knows no formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import lightning as L
import torch
from torch import Tensor

from lit_grpo.types import RolloutBatch

Value = TypeVar("Value")


def gather_rewards(module: L.LightningModule, rollouts: RolloutBatch) -> RolloutBatch:
    """The batch with the rewards of all ranks, for a mean or a deviation over them."""
    if module.trainer.world_size == 1:
        return rollouts

    def gather(tensor: Tensor) -> Tensor:
        gathered = module.all_gather(tensor.to(module.device))
        assert isinstance(gathered, Tensor)
        return gathered.flatten(0, 1).cpu()

    return replace(
        rollouts,
        rewards=gather(rollouts.rewards),
        valid=gather(rollouts.valid),
        parts={name: gather(part) for name, part in rollouts.parts.items()},
    )


def gather_objects(value: Value) -> list[Value]:
    """What each rank has, in the order of the ranks; on the CPU."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [value]
    gathered: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, value)
    return gathered


def any_failure(failure: str) -> str:
    """What the first rank says that has failed, empty where none has; every rank must call it."""
    return next(filter(None, gather_objects(failure)), "")


def get_rank() -> int:
    """The number of this process among those of the run; 0 where there is one."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0
    return torch.distributed.get_rank()


def sum_over_ranks(module: L.LightningModule, values: Sequence[Tensor]) -> list[float]:
    """Each value summed over all ranks, in one reduction."""
    summed = module.trainer.strategy.reduce(torch.stack(list(values)), reduce_op="sum")
    assert isinstance(summed, Tensor)
    return summed.tolist()
