"""Communication between the ranks of a run; all functions also work without a process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from lit_grpo.types import RewardTable

if TYPE_CHECKING:
    import lightning as L  # for annotations only: reward worker processes must start fast

T = TypeVar("T")


def gather_rewards(module: L.LightningModule, own: RewardTable) -> RewardTable:
    """Return the rewards of all ranks, for statistics over the whole batch."""
    if module.trainer.world_size == 1:
        return own

    def gather(tensor: Tensor) -> Tensor:
        gathered = module.all_gather(tensor.to(module.device))
        assert isinstance(gathered, Tensor)
        return gathered.flatten(0, 1).cpu()

    return replace(
        own,
        rewards=gather(own.rewards),
        parts={name: gather(part) for name, part in own.parts.items()},
        valid=gather(own.valid),
        lengths=gather(own.lengths),
    )


def gather_objects(value: T) -> list[T]:
    """Return the values of all ranks, in the order of the ranks; every rank must call this.

    Values are pickled, so tensors in them should be on the CPU.
    """
    gathered = [value] * get_world_size()
    if _has_process_group():
        torch.distributed.all_gather_object(gathered, value)
    return gathered


def any_failure(failure: T) -> T:
    """Return the message, or the error, of the first rank that has failed.

    Every rank must call this.

    Args:
        failure: This rank's failure; empty, or None, if it has not failed. So is the result if no
            rank has.
    """
    return next(filter(None, gather_objects(failure)), failure)


def get_rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return torch.distributed.get_rank() if _has_process_group() else 0


def get_world_size() -> int:
    """Return the number of processes of the run; 1 without a process group."""
    return torch.distributed.get_world_size() if _has_process_group() else 1


def max_over_ranks(number: int) -> int:
    """Return the largest of a number on all ranks; every rank must call this."""
    return max(gather_objects(number))


def sum_over_ranks(module: L.LightningModule, values: Sequence[Tensor]) -> list[float]:
    """Return each value summed over all ranks, in one reduction; every rank must call this.

    Values on the CPU do not wait for a GPU unless there are several ranks.
    """
    own = torch.stack(list(values))
    if module.trainer.world_size > 1:
        own = own.to(module.device)
    summed = module.trainer.strategy.reduce(own, reduce_op="sum")
    assert isinstance(summed, Tensor)
    sums: list[float] = summed.tolist()
    return sums


def _has_process_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
