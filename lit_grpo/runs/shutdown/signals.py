"""End a run at a signal, on all ranks, with a checkpoint.

Replaces Lightning's signal handling, which drops the step in flight, exits with 0 and hangs under
DDP.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any

import lightning as L
import torch

from lit_grpo.distributed.ranks import gather_objects
from lit_grpo.runs.safe_points import StopAtSafePoints, stop_safely
from lit_grpo.stopping import exit_code_of_signal

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)

ECHO_SECONDS, ECHO_SECONDS_OF_LAUNCHER = 0.1, 0.5
"""A second signal within this time is the same request: ``timeout``, a container, or later a
launcher may forward the signal that the whole process group has already received."""
LAUNCHERS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
"""Environment variables of processes that a launcher has started."""


def not_ignored() -> list[signal.Signals]:
    """Return the signals that end a run; ``nohup`` lets it outlive its terminal."""
    outlives = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [one for one in SIGNALS if not (outlives and one == signal.SIGHUP)]


class StopOnSignal(StopAtSafePoints):
    """End the run at one of `SIGNALS`, such as Ctrl-C; ``Checkpoints`` writes a checkpoint.

    It ends on all ranks, with exit code 128 + signal, including ranks that did not receive the
    signal. A step or a validation that samples, or waits for servers or rewards, is abandoned,
    and a resumed run repeats it; an update is finished. A second signal ends the process at once,
    except that Ctrl-C raises KeyboardInterrupt in a notebook.
    Lightning's handler of SLURM, which saves in the middle of a step, is replaced.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The signal that this rank has received, if any."""
        self.noticed: tuple[float, signal.Signals] | None = None
        """When a thread has seen the first signal. The handler waits for the main thread, which may
        be in a collective for ever."""
        self._received_at = 0.0
        self._parent = os.getppid()
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.received = self.noticed = None
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in not_ignored():
            self._previous_handlers[signum] = signal.signal(signum, self._receive)

    def notice(self, signum: int, now: float) -> None:
        """Take note of a signal that the main thread may not have seen; called from a thread."""
        self.noticed = self.noticed or (now, signal.Signals(signum))

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        """Record the signal; more is not safe because a handler may interrupt any instruction."""
        now = time.monotonic()
        if self.received is None:
            self.received, self._received_at = signal.Signals(signum), now
            self.notice(signum, now)
            write_stderr(
                f"{self.received.name}: ending with a checkpoint, at once or after this update. "
                f"Send it again to end {_what_ends()} without one."
            )
        elif signum != signal.SIGHUP and now - self._received_at > _echo_seconds():
            show_cursor()
            write_stderr(f"{signal.Signals(signum).name} again: ending {_what_ends()} now.")
            if signum == signal.SIGINT and is_interactive():
                raise KeyboardInterrupt
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    def stop_if_due(self, trainer: L.Trainer) -> None:
        """Stop all ranks if any of them has received a signal."""
        received = torch.tensor(self.received or 0, device=trainer.strategy.root_device)
        signum = int(trainer.strategy.reduce(received, reduce_op="max"))
        if signum:
            message = f"Ended by {signal.Signals(signum).name} after {{steps}}."
            # Not asked when the signal comes: a launcher that is killed may still be dying then.
            is_orphan = _has_launcher() and os.getppid() != self._parent
            orphans = gather_objects(self.received and is_orphan)
            if any(orphans):
                ranks = ", ".join(str(rank) for rank, one in enumerate(orphans) if one)
                message += f" The launcher of rank {ranks} has died."
            stop_safely(trainer, exit_code_of_signal(signum), message)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Restore the handlers once the last checkpoint and the final model are written."""
        self._restore_handlers()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        for signum, handler in self._previous_handlers.items():
            if signal.getsignal(signum) == self._receive:  # Lightning may have restored its own
                signal.signal(signum, handler)
        self._previous_handlers = {}


def received_signal(trainer: L.Trainer, *, min_age: float = 0.0) -> signal.Signals | None:
    """Return the signal that is to end the training of this rank, if any.

    Args:
        min_age: Ignore a signal that came less than so many seconds ago.
    """
    latest = time.monotonic() - min_age
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    noticed = (one.noticed for one in callbacks if isinstance(one, StopOnSignal))
    return next((signum for seen, signum in filter(None, noticed) if seen <= latest), None)


def handles_signals() -> bool:
    """Return whether a `StopOnSignal` receives this process's signals: the training has begun."""
    return any(stopper(one) is not None for one in SIGNALS)


def stopper(signum: int) -> StopOnSignal | None:
    """Return the callback that handles a signal, if one does."""
    handler = getattr(signal.getsignal(signum), "__self__", None)
    return handler if isinstance(handler, StopOnSignal) else None


def _has_launcher() -> bool:
    """Return whether a launcher has started this process: else its parent may be a shell."""
    return any(name in os.environ for name in LAUNCHERS)


def is_interactive() -> bool:
    """Return whether this is a notebook or a Python prompt, which outlives a run."""
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules


def _what_ends() -> str:
    return "the run" if is_interactive() else "the process"


def _echo_seconds() -> float:
    return ECHO_SECONDS_OF_LAUNCHER if _has_launcher() else ECHO_SECONDS


def write_stderr(message: str) -> None:
    """Write unbuffered: a signal handler may interrupt a print or a log call.

    Ctrl-C also ends a program that reads the output, as ``tee``, and often sooner.
    """
    with suppress(OSError):
        os.write(2, f"\n{message}\n".encode())


def show_cursor() -> None:
    """Undo what a live progress bar does to a terminal; at such an end it cannot."""
    with suppress(OSError):
        if os.isatty(1):
            os.write(1, b"\x1b[?25h")
