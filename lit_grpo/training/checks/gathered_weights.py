"""Report the cost of sampling with a policy whose weights are divided over the ranks."""

from __future__ import annotations

import logging

import torch
from lightning.pytorch.utilities import rank_zero_only

from lit_grpo.policy import Policy
from lit_grpo.policy.sharding import compute_device

log = logging.getLogger(__name__)

SERVERS = "Servers need no such copy (model.engine, such as --config engines/vllm_server)."


def report_gathering(policy: Policy) -> None:
    """Log what each rank gathers for a rollout; warn if a GPU has no room for it.

    Call it after the weights have been divided: before that, less memory is free.
    """
    size = policy.sharding.gathered_bytes(policy.model)
    if not size:
        return
    rank_zero_only(log.info)(
        "the engine samples with the sharded policy: for each rollout and validation every rank "
        "gathers all of its weights, %s in addition to its own part. %s",
        *(_gib(size), SERVERS),
    )
    free = _free_bytes(compute_device(policy.model))
    if free is not None and size > free:
        rank_zero_only(log.warning)(
            "the whole policy has %s, and only %s are free on this GPU: gathering it to sample "
            "will run out of memory. %s",
            *(_gib(size), _gib(free), SERVERS),
        )


def _free_bytes(device: torch.device) -> int | None:
    """Return the bytes of a GPU that torch has or can still get; None for other devices."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _gib(size: int) -> str:
    return f"{size / 2**30:.3g} GiB"
