"""Report the stages of a rollout step to callbacks, while the step is running.

A callback may define ``on_stage_start(trainer, pl_module, name)`` and
``on_stage_end(trainer, pl_module, stage)``. One that may end the run while it waits for completions
or rewards defines ``on_wait(trainer, pl_module, _)``. One that shows how far a stage is reads
``pl_module.events.running`` whenever it likes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch

from lit_grpo.types import RunningStage, Stage, StageProgress


class StageEvents:
    """Report the stages of a module's steps to the callbacks of its trainer."""

    def __init__(self, module: L.LightningModule) -> None:
        self._module = module
        self.running: RunningStage | None = None
        """The stage that is running; an update rather than one of its micro-batches."""

    @contextmanager
    def stage(
        self,
        name: str,
        micro_batch: int | None = None,
        *,
        progress: Callable[[], StageProgress] = StageProgress,
    ) -> Iterator[dict[str, Any]]:
        """Time a stage; the dict that is yielded becomes ``Stage.details``.

        On a GPU the stage ends when the device has finished its work, so that its seconds include
        no work of other stages.

        Args:
            progress: Reads how far the stage is, for display.
        """
        self._notify("on_stage_start", name)
        details: dict[str, Any] = {}
        start = time.perf_counter()
        outer = self.running
        if micro_batch is None:
            self.running = RunningStage(name=name, started=start, progress=progress)
        try:
            yield details
        finally:
            self.running = outer
        if self._module.device.type == "cuda":
            torch.cuda.synchronize(self._module.device)
        finished = Stage(
            name=name,
            seconds=time.perf_counter() - start,
            micro_batch=micro_batch,
            details=details,
        )
        self._notify("on_stage_end", finished)

    def is_stop_requested(self) -> bool:
        """Call ``on_wait`` of the callbacks; return whether one of them ends the run."""
        self._notify("on_wait", None)
        return bool(self._module.trainer.should_stop)

    def _notify(self, hook: str, argument: object) -> None:
        """Call a hook on every callback that defines it; Lightning does not know these hooks."""
        for callback in self._module.trainer.callbacks:  # type: ignore[attr-defined]
            if listener := getattr(callback, hook, None):
                listener(self._module.trainer, self._module, argument)
