"""Report the stages of a rollout step to callbacks, while the step is running.

A callback may define any of these hooks, and read ``pl_module.events.running`` at any time:

- ``on_stage_start(trainer, pl_module, name)`` and ``on_stage_end(trainer, pl_module, stage)``;
- ``on_wait(trainer, pl_module, _)``, to end the run while it samples, or waits for servers or
  rewards;
- ``on_rollouts(trainer, pl_module, rollouts)``, which returns True, or the name of a cause, to
  skip the update on these rollouts;
- ``on_abandoned_rollouts(trainer, pl_module, rollouts)``, when scores that are missing end the run,
  on each rank that has rollouts;
- ``on_outage(trainer, pl_module, outage)``, when an engine or rewards do not answer, or did not
  for a while;
- ``on_skipped_step(trainer, pl_module, message)``, when a gradient is not finite;
- ``on_unscored(trainer, pl_module, message)``, when a validation leaves out completions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import lightning as L
import torch

from lit_grpo.diagnostics.memory import describe_out_of_memory, is_out_of_memory
from lit_grpo.stopping import get_stop_reason
from lit_grpo.types import RolloutBatch, RunningStage, Stage, StageProgress
from lit_grpo.types.errors import OutOfMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipReason:
    """Which callback skips the update of a rollout step, and why."""

    by: str
    """Class of the callback."""
    cause: str
    """Name of the cause; empty if it is not known."""

    def __str__(self) -> str:
        because = f" because of {self.cause}" if self.cause else ""
        return f"{self.by} skipped the update{because}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """An engine or rewards that do not answer, or did not answer for a while."""

    cause: str
    """Its name in the table of causes."""
    message: str


class Clock(Protocol):
    """Measures the work of a device."""

    is_asynchronous: bool
    """Whether work continues after the call that started it returns."""

    def mark(self) -> Any:
        """Return the moment at which the device has finished what it was given so far."""

    def seconds(self, start: Any, end: Any) -> float:
        """Return the time between two moments, both of which have passed."""

    def wait(self) -> None:
        """Wait until every moment so far has passed."""


class HostClock:
    """The clock of a device on which work is done when the call returns."""

    is_asynchronous = False

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def wait(self) -> None:
        pass


@dataclass(frozen=True)
class CudaClock:
    """The clock of a GPU."""

    device: torch.device
    is_asynchronous = True

    def mark(self) -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) / 1000

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)


def clock_of(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else HostClock()


@dataclass(frozen=True, slots=True)
class _Measured:
    """A stage whose end the device may not have reached."""

    name: str
    micro_batch: int | None
    start: Any
    end: Any
    details: dict[str, Any] = field(default_factory=dict)


class StageEvents:
    """Report the stages of a module's steps to the callbacks of its trainer."""

    def __init__(self, module: L.LightningModule) -> None:
        self._module = module
        self.running: RunningStage | None = None
        """The stage that is running; an update rather than one of its micro-batches."""
        self.is_paused = False
        """Whether the run pauses because of an outage."""
        self._measured: list[_Measured] = []

    @contextmanager
    def stage(
        self,
        name: str,
        micro_batch: int | None = None,
        *,
        progress: Callable[[], StageProgress] = StageProgress,
    ) -> Iterator[dict[str, Any]]:
        """Time a stage; the dict that is yielded becomes ``Stage.details``.

        On a GPU the stage ends when the device has finished its work, so its seconds include
        no work of other stages. A micro-batch does not wait for that: there, it is reported when
        the update ends.

        Args:
            progress: Reads how far the stage is, for display.
        """
        self._notify("on_stage_start", name)
        clock, outer = clock_of(self._module.device), self.running
        details: dict[str, Any] = {}
        started, start = time.perf_counter(), clock.mark()
        if micro_batch is None:
            self.running = RunningStage(name=name, started=started, progress=progress)
        try:
            yield details
        except BaseException as error:
            self._measured.clear()
            if is_out_of_memory(error):
                raise OutOfMemory(describe_out_of_memory(name, error)) from error
            raise
        finally:
            self.running = outer
        finished = _Measured(name, micro_batch, start, clock.mark(), details)
        self._measured.append(finished)
        if micro_batch is None or self.running is None or not clock.is_asynchronous:
            clock.wait()
            self._report_all(clock)

    def _report_all(self, clock: Clock) -> None:
        """Report the stages that have been measured, in the order of their ends."""
        measured, self._measured = self._measured, []
        for one in measured:
            stage = Stage(
                name=one.name,
                seconds=clock.seconds(one.start, one.end),
                micro_batch=one.micro_batch,
                details=one.details,
            )
            self._notify("on_stage_end", stage)

    def is_stop_requested(self) -> bool:
        """Call ``on_wait`` of the callbacks; return whether one of them ends the run.

        Lightning validates after a plain ``should_stop``, which does not end that validation.
        """
        trainer = self._module.trainer
        if trainer.state.fn != "fit":
            return False
        self._notify("on_wait", None)
        is_stopped = get_stop_reason(trainer) is not None
        return is_stopped or bool(trainer.should_stop and not trainer.validating)

    def reason_to_skip_update(self, rollouts: RolloutBatch) -> SkipReason | None:
        """Call ``on_rollouts`` of the callbacks; return None if the step is to be trained on.

        Such a callback must say the same on all ranks.
        """
        answers = self._notify("on_rollouts", rollouts)
        callbacks = self._module.trainer.callbacks  # type: ignore[attr-defined]
        names = [type(one).__name__ for one in callbacks if hasattr(one, "on_rollouts")]
        for name, answer in zip(names, answers, strict=True):
            if answer:
                return SkipReason(by=name, cause=answer if isinstance(answer, str) else "")
        return None

    def report_abandoned_rollouts(self, rollouts: RolloutBatch) -> None:
        """Call ``on_abandoned_rollouts`` of the callbacks."""
        self._notify("on_abandoned_rollouts", rollouts)

    def report_outage(self, cause: str, message: str) -> None:
        """Call ``on_outage`` of the callbacks."""
        self._notify("on_outage", Outage(cause=cause, message=message))

    def report_skipped_step(self, message: str) -> None:
        """Call ``on_skipped_step`` of the callbacks."""
        self._notify("on_skipped_step", message)

    def report_unscored(self, message: str) -> None:
        """Call ``on_unscored`` of the callbacks."""
        self._notify("on_unscored", message)

    def _notify(self, hook: str, argument: object) -> list[Any]:
        """Call a hook on every callback that defines it; Lightning does not know these hooks."""
        callbacks = self._module.trainer.callbacks  # type: ignore[attr-defined]
        listeners = filter(None, (getattr(callback, hook, None) for callback in callbacks))
        return [listener(self._module.trainer, self._module, argument) for listener in listeners]
