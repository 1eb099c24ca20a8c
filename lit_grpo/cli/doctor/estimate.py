"""Compare the memory that a config needs with what the machine has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psutil
import torch

from lit_grpo.cli.built_run import BuiltRun
from lit_grpo.cli.doctor.findings import Finding, failed, ok, remark
from lit_grpo.cli.doctor.machine import Memory, trainer_memory
from lit_grpo.cli.estimate.config import setup_of
from lit_grpo.cli.estimate.devices import Cluster, Device
from lit_grpo.cli.estimate.memory import (
    ALWAYS,
    MemoryEstimate,
    MemoryPart,
    estimate_memory,
    gib,
    when_in_words,
)

CLOSE = 0.85
"""Share of the available memory above which an estimate may be too low."""


def estimate(run: BuiltRun, memory: Memory) -> MemoryEstimate:
    """Return the memory that a process of the run needs.

    Raises:
        NotChecked: the model cannot be read.
    """
    trainer: Any = run.trainer
    device: torch.device = trainer.strategy.root_device
    setup = setup_of(
        run,
        Cluster(
            device=_device(memory),
            per_node=max(1, trainer.world_size // trainer.num_nodes),
            num_nodes=trainer.num_nodes,
        ),
        strategy=trainer.strategy,
        precision=trainer.precision,
        gpus=(str(device.index or 0),),
    )
    rss = psutil.Process().memory_info().rss
    libraries = None if memory.is_gpu else MemoryPart(name="Python and libraries", bytes=rss)
    return estimate_memory(setup, libraries)


def _device(memory: Memory) -> Device:
    """Return a device with this memory; its other fields are unused."""
    return Device(
        name=memory.name,
        memory=memory.total,
        is_gpu=memory.is_gpu,
        **dict.fromkeys(("flops", "flops_float32", "bandwidth", "link", "network"), 1.0),
    )


def check_memory(run: BuiltRun) -> Iterator[Finding]:
    """Compare the estimate with what the machine has."""
    device: torch.device = run.trainer.strategy.root_device
    memory = trainer_memory(device)
    found = estimate(run, memory)
    num_processes = 1 if memory.is_gpu else run.trainer.num_devices
    needed = num_processes * found.peak
    moment = found.moments[0]
    during = "" if moment == ALWAYS else f", {moment}"
    each = f" for {num_processes} processes" if num_processes > 1 else ""
    has = f"{gib(memory.available)} of the {gib(memory.total)} of {memory.name} are free"
    summary = f"Needs at most about {gib(needed)}{each}{during}; {has}."
    fix = f"To save memory, {'; or '.join(found.advice())}."
    if needed > memory.available:
        yield failed(summary, f"{fix} lit-grpo plan says what makes it fit.")
    elif needed > CLOSE * memory.available:
        yield remark(f"{summary} That is close for an estimate. {fix}")
    else:
        yield ok(summary)
    for when in dict.fromkeys(one.when for one in found.parts):
        listed = ", ".join(
            f"{one.name} {gib(one.bytes)}" for one in found.parts if one.when == when
        )
        yield ok(f"{when_in_words(when)}: {listed}")
