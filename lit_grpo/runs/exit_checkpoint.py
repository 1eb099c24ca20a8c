"""Write a checkpoint to resume from exactly when training ends, including by a signal.

Replaces Lightning's signal handling, which drops the step in flight, exits with 0 and hangs under
DDP.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lit_grpo.stopping import exit_code_of_signal, get_stop_reason, stop_run
from lit_grpo.types import StopReason

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

ECHO_SECONDS = 0.5
"""A second signal within this time is the same request: a launcher may forward the signal that the
whole process group has already received."""


class ExitCheckpoint(Callback):
    """Write ``last.ckpt`` when training is done or stopped by a callback or a signal.

    SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 end the run on all ranks after the rollout step in flight,
    with exit code 128 + signal, including ranks that did not receive the signal. A step that is
    waiting for completions of servers or for rewards is left undone, and a resumed run repeats it.
    A second signal ends the process at once. Under SLURM with automatic requeue, SIGUSR1 is left to
    Lightning.

    ``ModelCheckpoint(save_last=True)`` may write into the same directory: both write the same file,
    and no ``last-v1.ckpt`` appears. The file is written under a temporary name and moved, so that
    a kill during the save leaves the previous checkpoint.

    Args:
        dirpath: Directory of ``last.ckpt``, usually ``${run_dir}/checkpoints``.
    """

    def __init__(self, dirpath: str) -> None:
        self.path = Path(dirpath).absolute() / "last.ckpt"
        self.received: signal.Signals | None = None
        """The signal that this rank has received, if any."""
        self._received_at = 0.0
        self._is_saving = False
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for other in self._sharing_callbacks(trainer):
            # Otherwise it would avoid a ``last.ckpt`` that it did not write itself.
            other.last_model_path = other.last_model_path or os.path.join(
                str(other.dirpath), self.path.name
            )
        self.received = None
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in SIGNALS:
            previous = signal.getsignal(signum)
            if signum is not signal.SIGUSR1 or previous is signal.SIG_DFL:
                self._previous_handlers[signum] = previous
                signal.signal(signum, self._receive)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        """Record the signal; more is not safe because a handler may interrupt any instruction."""
        now = time.monotonic()
        if self.received is None:
            self.received, self._received_at = signal.Signals(signum), now
            _write_stderr(
                f"{self.received.name}: ending after this rollout step, with a checkpoint. "
                "Send it again to end at once, without a checkpoint."
            )
        elif now - self._received_at > ECHO_SECONDS:
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
        self._stop_if_asked(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._stop_if_asked(trainer)

    def on_wait(self, trainer: L.Trainer, pl_module: L.LightningModule, _: None) -> None:
        """Stop without finishing the step: what it waits for may take long to arrive."""
        self._stop_on_signal(trainer, is_step_unfinished=True)

    def _stop_if_asked(self, trainer: L.Trainer) -> None:
        """Stop, but not while gradients are being accumulated, because they would be lost."""
        num_batches = trainer.fit_loop.batch_idx + 1
        if num_batches % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch:
            self._stop_on_signal(trainer)

    def _stop_on_signal(self, trainer: L.Trainer, *, is_step_unfinished: bool = False) -> None:
        """Stop all ranks if any of them has received a signal."""
        received = torch.tensor(self.received or 0, device=trainer.strategy.root_device)
        signum = int(trainer.strategy.reduce(received, reduce_op="max"))
        if signum:
            num_steps = trainer.fit_loop.total_batch_idx + 1 - is_step_unfinished
            steps = "step" if num_steps == 1 else "steps"
            message = f"Ended by {signal.Signals(signum).name} after {num_steps} rollout {steps}."
            reason = StopReason(
                exit_code=exit_code_of_signal(signum),
                message=message,
                is_step_unfinished=is_step_unfinished,
            )
            stop_run(trainer, reason)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._save(trainer)
        self._restore_handlers()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self._restore_handlers()

    def _save(self, trainer: L.Trainer) -> None:
        partial = self.path.with_name(self.path.name + ".partial")
        if trainer.is_global_zero:
            _remove(partial)
        trainer.strategy.barrier("ExitCheckpoint")
        self._is_saving = True
        trainer.save_checkpoint(partial)
        self._is_saving = False
        if trainer.is_global_zero:
            _move(partial, self.path)
        for other in self._sharing_callbacks(trainer):
            # Otherwise it would write the file again if training ends before its own first save.
            other._last_checkpoint_saved = str(self.path)
        trainer.strategy.barrier("ExitCheckpoint")

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Set the loop counters to the end of the last batch, from where Lightning resumes exactly.

        From the end of training it does not: it counts the epoch as finished even when it was cut
        short, drops the position of the data loader, and may count a step twice. A step that was
        left undone is not counted, so that a resumed run repeats it.
        """
        if not self._is_saving:
            return
        loops = checkpoint["loops"]["fit_loop"]
        for span in ("total", "current"):
            loops["epoch_loop.batch_progress"][span]["completed"] -= 1
            loops["epoch_progress"][span]["processed"] -= 1
            loops["epoch_progress"][span]["completed"] -= 1
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
        reason = get_stop_reason(trainer)
        if reason is not None and reason.is_step_unfinished:
            progress = loops["epoch_loop.batch_progress"]
            progress["is_last_batch"] = False
            for span, counter in product(("total", "current"), progress["total"]):
                progress[span][counter] -= 1
            loops["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1

    def _restore_handlers(self) -> None:
        for signum, handler in self._previous_handlers.items():
            signal.signal(signum, handler)
        self._previous_handlers = {}

    def _sharing_callbacks(self, trainer: L.Trainer) -> list[ModelCheckpoint]:
        """Return the callbacks that write the same file."""
        return [
            other
            for other in trainer.checkpoint_callbacks
            if isinstance(other, ModelCheckpoint)
            and other.save_last
            and Path(other.dirpath or "").resolve() == self.path.parent.resolve()
        ]


def _write_stderr(message: str) -> None:
    """Write unbuffered: a signal handler may interrupt a print or a log call."""
    os.write(2, f"\n{message}\n".encode())


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _move(source: Path, target: Path) -> None:
    """Replace the target; a directory, as sharded strategies write it, is moved away first."""
    if target.is_dir() and not target.is_symlink():
        old = target.with_name(target.name + ".old")
        _remove(old)
        target.rename(old)
        source.rename(target)
        _remove(old)
    else:
        os.replace(source, target)
