"""Tells callbacks which phase of a rollout step begins and ends, while the step still runs.

Any callback may define ``on_stage_start(trainer, pl_module, name)`` and
``on_stage_end(trainer, pl_module, stage)``; one that may end a run while it waits for completions
or rewards defines ``on_wait(trainer, pl_module, _)``. Nothing here logs or keeps a record.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import lightning as L
import torch

from lit_grpo.types import Stage

Method = TypeVar("Method", bound=Callable[..., Any])


@contextmanager
def stage(
    module: L.LightningModule, name: str, micro_batch: int | None = None
) -> Iterator[dict[str, Any]]:
    """Time a phase; what is put into the yielded dict becomes ``Stage.details``.

    On a GPU the phase ends when the device has done its work, so that seconds are its own.
    """
    notify(module, "on_stage_start", name)
    details: dict[str, Any] = {}
    start = time.perf_counter()
    yield details
    if module.device.type == "cuda":
        torch.cuda.synchronize(module.device)
    finished = Stage(
        name=name,
        seconds=time.perf_counter() - start,
        micro_batch=micro_batch,
        details=details,
    )
    notify(module, "on_stage_end", finished)


def in_stage(name: str) -> Callable[[Method], Method]:
    """Make every call of a LightningModule's method a stage."""

    def decorate(method: Method) -> Method:
        @wraps(method)
        def timed(self: L.LightningModule, *args: Any, **kwargs: Any) -> Any:
            with stage(self, name):
                return method(self, *args, **kwargs)

        return timed  # type: ignore[return-value]

    return decorate


def notify(module: L.LightningModule, hook: str, argument: object) -> None:
    """Call a hook that Lightning does not know on every callback that defines it."""
    for callback in module.trainer.callbacks:  # type: ignore[attr-defined]
        if listener := getattr(callback, hook, None):
            listener(module.trainer, module, argument)
