"""End a run at a signal, on all ranks, with a checkpoint.

Replaces Lightning's signal handling, which drops the step in flight, exits with 0 and hangs under
DDP.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from lit_grpo.stopping import exit_code_of_signal, stop_run
from lit_grpo.types import StopReason

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

ECHO_SECONDS = 0.5
"""A second signal within this time is the same request: a launcher may forward the signal that the
whole process group has already received."""


class StopOnSignal(Callback):
    """End the run at SIGTERM, SIGINT (Ctrl-C) or SIGUSR1; ``Checkpoints`` writes a checkpoint.

    It ends on all ranks, with exit code 128 + signal, including ranks that did not receive the
    signal. A step or a validation that samples, or waits for servers or rewards, is left undone,
    and a resumed run repeats it; an update is finished. A second signal ends the process at once.
    Lightning's handler of SLURM, which saves in the middle of a step, is replaced.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The signal that this rank has received, if any."""
        self._received_at = 0.0
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.received = None
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in SIGNALS:
            self._previous_handlers[signum] = signal.signal(signum, self._receive)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        """Record the signal; more is not safe because a handler may interrupt any instruction."""
        now = time.monotonic()
        if self.received is None:
            self.received, self._received_at = signal.Signals(signum), now
            _write_stderr(
                f"{self.received.name}: ending with a checkpoint, at once or after this update. "
                "Send it again to end without one."
            )
        elif now - self._received_at > ECHO_SECONDS:
            _show_cursor()
            _write_stderr(f"{signal.Signals(signum).name} again: ending now.")
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if is_between_steps(trainer):
            self._stop_if_received(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if is_validation_of_fit(trainer) and is_between_steps(trainer):
            self._stop_if_received(trainer)

    def on_wait(self, trainer: L.Trainer, pl_module: L.LightningModule, _: None) -> None:
        """Stop without finishing the step: what it waits for may take long to arrive."""
        self._stop_if_received(trainer)

    def _stop_if_received(self, trainer: L.Trainer) -> None:
        """Stop all ranks if any of them has received a signal."""
        received = torch.tensor(self.received or 0, device=trainer.strategy.root_device)
        signum = int(trainer.strategy.reduce(received, reduce_op="max"))
        if signum:
            message = f"Ended by {signal.Signals(signum).name} after {{steps}}."
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


def stop_safely(trainer: L.Trainer, exit_code: int, message: str) -> None:
    """Stop between two steps or within one, which is then left undone.

    Args:
        message: Says ``{steps}`` where the number of finished steps belongs.
    """
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.total
    num_steps = progress.processed
    reason = StopReason(
        exit_code=exit_code,
        message=message.format(steps=f"{num_steps} rollout step{'' if num_steps == 1 else 's'}"),
        is_step_unfinished=progress.ready > num_steps,
    )
    stop_run(trainer, reason)


def is_validation_of_fit(trainer: L.Trainer) -> bool:
    """Return whether the validation that has just ended is one of a training."""
    return trainer.state.fn == "fit" and not trainer.sanity_checking


def is_between_steps(trainer: L.Trainer) -> bool:
    """Return whether no gradients are being accumulated, which a stop or a save would lose."""
    num_batches = trainer.fit_loop.batch_idx + 1
    return num_batches % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch


def _write_stderr(message: str) -> None:
    """Write unbuffered: a signal handler may interrupt a print or a log call."""
    os.write(2, f"\n{message}\n".encode())


def _show_cursor() -> None:
    """Undo what a live progress bar does to a terminal; at such an end it cannot."""
    if os.isatty(1):
        os.write(1, b"\x1b[?25h")
