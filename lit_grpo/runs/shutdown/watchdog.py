"""Notice that a run makes no progress, and tell a deadlock from a step that is only long."""

from __future__ import annotations

import logging
import os
import signal
import threading
from contextlib import suppress
from typing import Any, Literal

import lightning as L
import torch

from lit_grpo.diagnostics.step_log import step_number
from lit_grpo.runs.files.events import record_event
from lit_grpo.runs.progress.activity import all_stacks, describe_activity, is_busy, select_gpu
from lit_grpo.runs.progress.run_progress import clock_time
from lit_grpo.runs.safe_points import StopAtSafePoints, stop_safely
from lit_grpo.runs.shutdown.signals import received_signal
from lit_grpo.runs.shutdown.stalls import Snapshot, StallTracker, take_snapshot
from lit_grpo.stopping import ExitCode, exit_code_of_signal, get_stop_reason
from lit_grpo.types import Stage, check_range
from lit_grpo.types.errors import as_rank_lost
from lit_grpo.types.field_types import checks_types
from lit_grpo.types.keywords import checks_keywords

log = logging.getLogger(__name__)

NUM_SNAPSHOTS = 20
"""Snapshots of the run within the shortest time that may be a stall."""
BUSY_PATIENCE = 4
"""A process that computes is ended after this many times the time that is a stall."""
STOP_SECONDS = 30.0
"""Time for the main thread to start stopping; after it the process is killed as stuck."""
SAVE_SECONDS = 1800.0
"""Time to abandon the step, save and close."""


@checks_keywords
@checks_types
class StallWatchdog(StopAtSafePoints):
    """Report that a run makes no progress, and whether that looks like a deadlock.

    Progress is a stage that ends, or a completion or a token more in the one that is running. A run
    without it for too long has stalled: the log says in which stage, how far it was, and whether
    the process or its GPU computes; ``run.log`` has the stacks of all threads. A stage that takes
    long but advances is reported as slow, with an estimate of its end. The pauses of an outage are
    no stalls.

    Args:
        action: ``warn`` only reports. ``stop`` also ends a run that looks like a deadlock, with
            exit code 8, and one that computes after four times as long. The step is abandoned,
            with a checkpoint. If the main thread is stuck, or waits for a rank whose main thread
            is, the process is killed without a new checkpoint. With either action, so is a process
            that is stuck after a signal, half a minute after the signal at the earliest.
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
        self._is_over = threading.Event()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._why, self._is_over = "", threading.Event()
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
        """Stop all ranks if the watchdog of any rank asks for it."""
        if self.action == "stop":
            wanted = torch.tensor(int(bool(self._why)), device=trainer.strategy.root_device)
            if int(trainer.strategy.reduce(wanted, reduce_op="max")):
                why = self._why or "Another process of the run made no progress."
                message = why.replace("{", "{{").replace("}", "}}")
                stop_safely(trainer, ExitCode.STALLED, f"Stopped after {{steps}}. {message}")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._is_over.set()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        if self._why and as_rank_lost(exception) is not None:
            _end_process(trainer)  # the other rank was ended a moment earlier, for the same reason
        self._is_over.set()

    def _watch(
        self, trainer: L.Trainer, pl_module: L.LightningModule, is_over: threading.Event
    ) -> None:
        """Watch the run until it is over; runs in a thread of its own."""
        select_gpu(trainer.strategy.root_device)
        tracker = StallTracker(take_snapshot(pl_module, self._num_ended))
        while not is_over.wait(self.min_seconds / NUM_SNAPSHOTS):
            snapshot = take_snapshot(pl_module, self._num_ended)
            tracker.update(snapshot)
            allowed = self._allowed_seconds(snapshot.name)
            if tracker.is_stall_due(allowed):
                self._report_stall(trainer, pl_module, tracker)
            elif tracker.is_slow_due(allowed):
                message = tracker.describe_slow(_where(trainer, snapshot), _max_tokens(pl_module))
                log.warning("%s", message)
                record_event(trainer, "warning", message, "slow_stage")
            if self._is_to_end(trainer) and _is_stuck(tracker, allowed):
                self._end(trainer, is_over)
                return

    def _is_to_end(self, trainer: L.Trainer) -> bool:
        """Return whether the run is to end if it is stuck."""
        return self.action == "stop" or received_signal(trainer, min_age=STOP_SECONDS) is not None

    def _allowed_seconds(self, name: str) -> float:
        """Return how long a stage may make no progress."""
        if name not in self._longest:
            return self.first_seconds
        return max(self.min_seconds, self.factor * self._longest[name])

    def _report_stall(
        self, trainer: L.Trainer, pl_module: L.LightningModule, tracker: StallTracker
    ) -> None:
        verdict = _verdict(
            is_busy(tracker.cpu),
            waits_on_gpu=trainer.world_size > 1 and trainer.strategy.root_device.type == "cuda",
        )
        seen = tracker.snapshot
        self._message = (
            f"No progress for {clock_time(tracker.quiet_seconds)} in {_where(trainer, seen)}"
            f"{seen.counts}. {verdict} ({describe_activity(tracker.cpu)}). "
            f"{_hints(pl_module, seen.name)}The stacks of all threads are in run.log."
        )
        log.warning("%s", self._message, extra={"traceback": all_stacks()})
        record_event(trainer, "stall", self._message, "stalled")

    def _end(self, trainer: L.Trainer, is_over: threading.Event) -> None:
        """End the run in its main thread, or the process if that is stuck."""
        self._why = self._message
        is_over.wait(STOP_SECONDS)
        if get_stop_reason(trainer) is not None:  # it is stopping
            is_over.wait(SAVE_SECONDS)
        if not is_over.is_set():
            _end_process(trainer)


def _verdict(computes: bool, *, waits_on_gpu: bool) -> str:
    """Return what a stage without progress looks like.

    Args:
        waits_on_gpu: Whether ranks wait for each other in kernels, which look like computing.
    """
    if not computes:
        return (
            "It looks like a deadlock, or a wait for something that does not answer: nothing is "
            "computed"
        )
    if waits_on_gpu:
        return (
            "It looks slow, or it waits for another rank, during which a GPU is busy, too: compare "
            "the stages in which the ranks are"
        )
    return "It looks slow rather than stuck: something is computed"


def _is_stuck(tracker: StallTracker, allowed: float) -> bool:
    patience = BUSY_PATIENCE if is_busy(tracker.cpu) else 1
    return tracker.quiet_seconds > patience * allowed


def _end_process(trainer: L.Trainer) -> None:
    """End this process, and the ranks that it has started: they may wait for it for ever."""
    log.error(
        "Its main thread is stuck, or waits for a rank that is, so the process ends here, without "
        "a new checkpoint."
    )
    if (launcher := trainer.strategy.launcher) is not None:
        launcher.kill(signal.SIGKILL)
    signum = received_signal(trainer)
    os._exit(exit_code_of_signal(signum) if signum else ExitCode.STALLED)


def _where(trainer: L.Trainer, snapshot: Snapshot) -> str:
    step = f"rollout step {step_number(trainer)}"
    return f"stage {snapshot.name} of {step}" if snapshot.name else f"{step}, between two stages"


def _max_tokens(module: L.LightningModule) -> int | None:
    max_tokens: int | None = getattr(getattr(module, "sampling", None), "max_tokens", None)
    return max_tokens


def _hints(module: L.LightningModule, stage: str) -> str:
    """Return what may hold up a stage: what is pending, and where."""
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
