"""What the ranks of a run must know of each other within a rollout step. Knows no formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import lightning as L
import torch
from torch import Tensor

from lit_grpo.types import RolloutBatch


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


def gather_values(values: Tensor) -> Tensor:
    """[T] of this rank to those of all ranks, whose numbers may differ."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return values
    gathered: list[Tensor] = [values] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, values.cpu())
    return torch.cat(gathered)


def sum_over_ranks(module: L.LightningModule, values: Sequence[Tensor]) -> list[float]:
    """Each value summed over all ranks, in one reduction."""
    summed = module.trainer.strategy.reduce(torch.stack(list(values)), reduce_op="sum")
    assert isinstance(summed, Tensor)
    return summed.tolist()


def max_over_ranks(module: L.LightningModule, value: int) -> int:
    """The largest of the ranks' values."""
    gathered = module.all_gather(torch.tensor(value, device=module.device))
    assert isinstance(gathered, Tensor)
    return int(gathered.max())
