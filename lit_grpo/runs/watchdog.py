"""Notice that a run makes no progress, and tell a deadlock from a step that is only long."""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import lightning as L
import torch

from lit_grpo.runs.activity import CPUMeter, all_stacks, describe_activity, is_busy
from lit_grpo.runs.events import record_event
from lit_grpo.runs.run_progress import clock_time
from lit_grpo.runs.safe_points import StopAtSafePoints, stop_safely
from lit_grpo.stopping import ExitCode
from lit_grpo.types import RunningStage, Stage, StageProgress, as_rank_lost, check_range

log = logging.getLogger(__name__)

LOOKS = 20
"""Looks at the run within the shortest time that may be a stall."""
BUSY_PATIENCE = 4
"""A process that computes is ended after this many times the time that is a stall."""
LEAVE_SECONDS = 30.0
"""Time for the main thread to begin to leave; if it is stuck, the process is ended."""
SAVE_SECONDS = 1800.0
"""Time to leave, save and close."""


class StallWatchdog(StopAtSafePoints):
    """Report that a run makes no progress, and whether that looks like a deadlock.

    Progress is a stage that ends, or a completion or a token more in the one that is running. A run
    without it for too long has stalled: the log says in which stage, how far it was, and whether
    the process or its GPU computes; ``run.log`` has the stacks of all threads. A stage that takes
    long but advances is reported as slow, with an estimate of its end. The pauses of an outage are
    no stalls.

    Args:
        action: ``warn`` only reports. ``stop`` also ends a run that looks like a deadlock, with
            exit code 8, and one that computes after four times as long. The step is left undone,
            with a checkpoint; a process whose main thread is stuck, or waits for another rank that
            is, is ended without a new one.
        min_seconds: Shortest time without progress that is a stall.
        first_seconds: The same for the first stage of each kind, which may compile or wait for
            servers, and between stages.
        factor: Later, a stall takes this many times the longest stage of its kind, if that is more
            than ``min_seconds``.
        enabled: False leaves it out of the run, which has one otherwise.

    Raises:
        UserError: a number is out of range.
    """

    def __init__(
        self,
        action: Literal["warn", "stop"] = "warn",
        min_seconds: float = 300.0,
        first_seconds: float = 1800.0,
        factor: float = 5.0,
        enabled: bool = True,
    ) -> None:
        key = "StallWatchdog.init_args."
        check_range(f"{key}min_seconds", min_seconds, above=0)
        check_range(f"{key}first_seconds", first_seconds, at_least=min_seconds)
        check_range(f"{key}factor", factor, at_least=1)
        self.action = action
        self.min_seconds = min_seconds
        self.first_seconds = first_seconds
        self.factor = factor
        self.enabled = enabled
        self._longest: dict[str, float] = {}
        """Name of a stage -> the seconds of the longest one."""
        self._num_ended = 0
        """Stages, steps and batches of a validation that have ended."""
        self._why = ""
        """Why the run is to end; empty while it is not."""
        self._is_leaving = False
        self._is_over = threading.Event()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._why, self._is_leaving, self._is_over = "", False, threading.Event()
        words = [trainer, pl_module, self._is_over]
        threading.Thread(target=self._watch, args=words, name="watchdog", daemon=True).start()

    def on_stage_end(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: Stage) -> None:
        self._longest[stage.name] = max(self._longest.get(stage.name, 0.0), stage.seconds)
        self._num_ended += 1

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._num_ended += 1
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._num_ended += 1

    def stop_if_due(self, trainer: L.Trainer) -> None:
        """Stop all ranks if the watchdog of any wants to."""
        if self.action == "stop":
            wanted = torch.tensor(int(bool(self._why)), device=trainer.strategy.root_device)
            if int(trainer.strategy.reduce(wanted, reduce_op="max")):
                self._is_leaving = True
                why = self._why or "Another process of the run made no progress."
                message = why.replace("{", "{{").replace("}", "}}")
                stop_safely(trainer, ExitCode.STALLED, f"Stopped after {{steps}}. {message}")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._is_over.set()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        if self._why and as_rank_lost(exception) is not None:
            _end_process()  # the other rank was ended a moment earlier, for the same reason
        self._is_over.set()

    def _watch(
        self, trainer: L.Trainer, pl_module: L.LightningModule, is_over: threading.Event
    ) -> None:
        """Look at the run until it is over; runs in a thread of its own."""
        watch = Watch(_look(pl_module, self._num_ended))
        while not is_over.wait(self.min_seconds / LOOKS):
            look = _look(pl_module, self._num_ended)
            watch.take(look)
            allowed = self._allowed_seconds(look.name)
            if watch.is_stall_due(allowed):
                busy = is_busy(watch.cpu)
                self._report_stall(trainer, pl_module, watch, busy)
                patience = BUSY_PATIENCE if busy else 1
                if self.action == "stop" and watch.quiet_seconds > patience * allowed:
                    self._end(is_over)
                    return
            elif watch.is_slow_due(allowed):
                message = watch.describe_slow(_where(trainer, look), _max_tokens(pl_module))
                log.warning("%s", message)
                record_event(trainer, "warning", message, "slow_stage")

    def _allowed_seconds(self, name: str) -> float:
        """Return how long a stage may make no progress."""
        if name not in self._longest:
            return self.first_seconds
        return max(self.min_seconds, self.factor * self._longest[name])

    def _report_stall(
        self, trainer: L.Trainer, pl_module: L.LightningModule, watch: Watch, busy: bool
    ) -> None:
        verdict = (
            "It looks slow rather than stuck: something is computed"
            if busy
            else "It looks like a deadlock, or a wait for something that does not answer: nothing "
            "is computed"
        )
        self._message = (
            f"No progress for {clock_time(watch.quiet_seconds)} in {_where(trainer, watch.look)}"
            f"{watch.look.counts}. {verdict} ({describe_activity(watch.cpu)}). "
            f"{_hints(pl_module, watch.look.name)}The stacks of all threads are in run.log."
        )
        log.warning("%s", self._message, extra={"traceback": all_stacks()})
        record_event(trainer, "stall", self._message, "stalled")

    def _end(self, is_over: threading.Event) -> None:
        """End the run in its main thread, or the process if that is stuck."""
        self._why = self._message
        is_over.wait(LEAVE_SECONDS)
        if self._is_leaving:
            is_over.wait(SAVE_SECONDS)
        if not is_over.is_set():
            _end_process()


def _end_process() -> None:
    log.error("Its main thread is stuck, so the process ends here, without a new checkpoint.")
    os._exit(ExitCode.STALLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What can be seen of a run at a moment."""

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


class Watch:
    """For how long a run has been at one place, and without progress."""

    def __init__(self, look: Look) -> None:
        self.look = look
        self.cpu = CPUMeter()
        self._entered = self._advanced = look
        self._num_stalls = self._num_slow = 0
        """Reports on this place; each waits twice as long as the one before."""

    def take(self, look: Look) -> None:
        """Compare what can be seen with what could be seen before."""
        before, self.look = self.look, look
        if look.place != before.place or look.is_paused:
            self._entered, self._num_slow = look, 0
        elif look.progress == before.progress:
            self.cpu.sample()
            return
        if self._num_stalls:
            log.info("The run goes on.")
        self._advanced, self._num_stalls = look, 0
        self.cpu = CPUMeter()

    @property
    def quiet_seconds(self) -> float:
        return self.look.time - self._advanced.time

    @property
    def seconds(self) -> float:
        """How long the run has been at this place."""
        return self.look.time - self._entered.time

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
        """Say that a stage takes long but advances, and when it may end."""
        first, now = self._entered.progress, self.look.progress
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
            f"now{self.look.counts}.{end}"
        )


def _look(module: L.LightningModule, num_ended: int) -> Look:
    events = getattr(module, "events", None)
    stage: RunningStage | None = getattr(events, "running", None)
    progress = StageProgress()
    if stage is not None:
        with suppress(Exception):  # it is read while the main thread works on it
            progress = stage.progress()
    return Look(
        time=time.monotonic(),
        num_ended=num_ended,
        stage=stage,
        progress=progress,
        is_paused=getattr(events, "is_paused", False),
    )


def _where(trainer: L.Trainer, look: Look) -> str:
    step = f"rollout step {max(0, trainer.fit_loop.total_batch_idx)}"
    return f"stage {look.name} of {step}" if look.name else f"{step}, between two stages"


def _max_tokens(module: L.LightningModule) -> int | None:
    max_tokens: int | None = getattr(getattr(module, "sampling", None), "max_tokens", None)
    return max_tokens


def _hints(module: L.LightningModule, stage: str) -> str:
    """Say what may hold up a stage: what is pending, where."""
    if stage in ("generation", "weight_sync", "evaluation"):
        return f"{_engine_state(getattr(module, 'engine', None))}{_unscored(module)}"
    return _unscored(module) if stage == "reward" else ""


def _engine_state(engine: Any) -> str:
    state = "can" if engine is not None and engine.health() else "cannot"
    pending = ""
    with suppress(Exception):  # its own thread works on what is read
        pending = engine.describe_pending()
    more = f": {pending}" if pending else ""
    return f"{type(engine).__name__} says that it {state} sample now{more}. "


def _unscored(module: L.LightningModule) -> str:
    """Return how many completions wait for which rewards, and which of these have no timeout."""
    suite: Any = getattr(module, "rewards", None)
    counts: dict[str, int] = {}
    with suppress(Exception):  # scores arrive while they are counted
        counts = suite.num_unscored() if suite is not None else {}
    if not counts:
        return ""
    waiting = ", ".join(f"{name} {number}" for name, number in counts.items())
    endless = [
        one.name for one in suite.rewards if one.name in counts and one.timeout_seconds is None
    ]
    without = f" Without timeout_seconds: {', '.join(endless)}." if endless else ""
    return f"Completions without a score: {waiting}.{without} "
