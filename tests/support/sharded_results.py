"""What `sharded_trainings` has saved, and what of it has to be as under DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

ON_DEVICE = " on a device"
"""What ends the name of a strategy in `pretend_trainings`."""
REDUCED_EARLY = {"fsdp2", "kept", "offloaded", "zero2", "zero2 offloaded"}
"""Strategies that sum over the ranks after each micro-batch, and so round in another order. Adam
enlarges that where a gradient is nearly 0, so that the norms of later steps differ more."""


def load(directory: Path, case: str, training: str, num_ranks: int = 2) -> list[Any]:
    names = [f"{case}-{training}-rank{rank}.pt" for rank in range(num_ranks)]
    return [torch.load(directory / name) for name in names]


def difference(one: Any, other: Any) -> float:
    assert one["weights"].keys() == other["weights"].keys()
    return max(
        float((weight.float() - other["weights"][name].float()).abs().max())
        for name, weight in one["weights"].items()
    )


def assert_is_sharded(ddp: list[Any], sharded: list[Any], strategy: str) -> None:
    for one, other in zip(ddp, sharded, strict=True):
        assert not any(one["is_sharded"])
        assert all(other["is_sharded"]) == (strategy[:5] not in ("zero1", "zero2"))
        # Half of it, except for padding and counts of steps.
        assert other["num_optimizer_values"] < 0.6 * one["num_optimizer_values"]
    assert difference(*sharded) == 0


def assert_as_under_ddp(directory: Path, case: str, strategy: str, *, ddp_case: str = "") -> None:
    is_early = strategy.removesuffix(ON_DEVICE) in REDUCED_EARLY
    later = 2e-6 if is_early else 1e-6
    ddp, sharded = load(directory, ddp_case or case, "ddp"), load(directory, case, strategy)
    assert_is_sharded(ddp, sharded, strategy)
    for one, other in zip(ddp, sharded, strict=True):
        assert difference(one, other) < 1e-5
        for step, (mine, theirs) in enumerate(zip(one["metrics"], other["metrics"], strict=True)):
            assert mine["policy/skipped_fraction"] == theirs["policy/skipped_fraction"]
            if not mine["policy/skipped_fraction"]:
                norms = mine["policy/grad_norm"], theirs["policy/grad_norm"]
                assert norms[0] == pytest.approx(norms[1], rel=later if step else 1e-6)
    # The ranks make unlike numbers of passes, so that some make one only for the others.
    counts = zip(*(rank["num_micro_batches"] for rank in sharded), strict=True)
    assert any(mine != theirs for mine, theirs in counts)
    # On a CPU one rank samples with prompts that rows share in each step, the other with copies.
    shares = zip(*(rank["shares_prompts"] for rank in sharded), strict=True)
    is_on_cpu = not strategy.endswith(ON_DEVICE)
    assert all((mine != theirs) == is_on_cpu for mine, theirs in shares)
