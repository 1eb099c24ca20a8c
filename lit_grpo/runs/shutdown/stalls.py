"""Detect that a run has stopped advancing, by comparing snapshots of it."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import dataclass

import lightning as L

from lit_grpo.runs.progress.activity import CPUMeter
from lit_grpo.runs.progress.run_progress import clock_time
from lit_grpo.types import RunningStage, StageProgress

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The visible state of a run at one moment."""

    time: float
    num_ended: int
    stage: RunningStage | None
    progress: StageProgress
    is_paused: bool

    @property
    def name(self) -> str:
        return "" if self.stage is None else self.stage.name

    @property
    def place(self) -> tuple[int, float]:
        return self.num_ended, 0.0 if self.stage is None else self.stage.started

    @property
    def counts(self) -> str:
        """How far the stage is: ``, at 12 of 512 completions and 18000 tokens``."""
        parts = []
        if self.progress.total:
            parts.append(f"{self.progress.num_done} of {self.progress.total} completions")
        if self.progress.num_tokens:
            parts.append(f"{self.progress.num_tokens} tokens")
        return f", at {' and '.join(parts)}" if parts else ""


class StallTracker:
    """Track for how long a run has been at one place, and without progress."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.cpu = CPUMeter()
        self._entered = self._advanced = snapshot
        self._num_stalls = self._num_slow = 0
        """Reports on this place; each waits twice as long as the one before."""

    def update(self, snapshot: Snapshot) -> None:
        """Compare the run with its last snapshot."""
        before, self.snapshot = self.snapshot, snapshot
        if snapshot.place != before.place or snapshot.is_paused:
            self._entered, self._num_slow = snapshot, 0
        elif snapshot.progress == before.progress:
            self.cpu.sample()
            return
        if self._num_stalls:
            log.info("The run goes on.")
        self._advanced, self._num_stalls = snapshot, 0
        self.cpu = CPUMeter()

    @property
    def quiet_seconds(self) -> float:
        return self.snapshot.time - self._advanced.time

    @property
    def seconds(self) -> float:
        """How long the run has been at this place."""
        return self.snapshot.time - self._entered.time

    def is_stall_due(self, allowed: float) -> bool:
        """Return whether a stall is to be reported, and count it."""
        is_due = self.quiet_seconds > allowed * 2**self._num_stalls
        self._num_stalls += is_due
        return bool(is_due)

    def is_slow_due(self, allowed: float) -> bool:
        """Return whether a stage that advances is to be reported as slow, and count it."""
        is_due = not self._num_stalls and self.seconds > allowed * 2**self._num_slow
        self._num_slow += is_due
        return is_due

    def describe_slow(self, where: str, max_tokens: int | None) -> str:
        """Return the message that a stage takes long but advances, and when it may end."""
        first, now = self._entered.progress, self.snapshot.progress
        num_done, num_tokens = now.num_done - first.num_done, now.num_tokens - first.num_tokens
        end = ""
        if num_done > 0 and now.total:
            left = (now.total - now.num_done) * self.seconds / num_done
            end = f" It may take {clock_time(left)} more."
        elif num_tokens > 0 and now.total and max_tokens:
            left = (now.total * max_tokens - now.num_tokens) * self.seconds / num_tokens
            end = f" It takes at most {clock_time(left)} more."
        return (
            f"{where[0].upper()}{where[1:]} is slow but advances, for {clock_time(self.seconds)} "
            f"now{self.snapshot.counts}.{end}"
        )


def take_snapshot(module: L.LightningModule, num_ended: int) -> Snapshot:
    """Return what can be seen of a run now; called from a thread of its own."""
    events = getattr(module, "events", None)
    stage: RunningStage | None = getattr(events, "running", None)
    progress = StageProgress()
    if stage is not None:
        with suppress(Exception):  # it is read while the main thread works on it
            progress = stage.progress()
    return Snapshot(
        time=time.monotonic(),
        num_ended=num_ended,
        stage=stage,
        progress=progress,
        is_paused=getattr(events, "is_paused", False),
    )
