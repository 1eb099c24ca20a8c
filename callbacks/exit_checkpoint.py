"""A signal ends a run after its rollout step, with an exact checkpoint; so does every other end.

Replaces Lightning's own handling, which drops the step in flight, exits with 0 and hangs under DDP.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import threading
import time
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lit_grpo.stopping import get_stop_reason, stop_run
from lit_grpo.types import StopReason

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

ECHO_SECONDS = 1.0
"""A launcher forwards what the whole process group got already: that soon it is the same stop."""


class ExitCheckpoint(Callback):
    """Writes ``last.ckpt`` when training ends, be it done, stopped by a callback or by a signal.

    SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 end the run after the rollout step in flight, on all ranks
    whichever got it, with exit code 128 + signal; a step that waits for servers' completions or for
    rewards is left undone. A second one ends the process at once. Under SLURM with automatic
    requeue SIGUSR1 stays with Lightning.

    ``ModelCheckpoint(save_last=True)`` may write into the same directory: both mean the same file,
    the latest wins, and no ``last-v1.ckpt`` appears. The file is written beside its place and moved
    there, so that a kill while it is written leaves the one before.

    Args:
        dirpath: Directory of ``last.ckpt``, commonly ``${run_dir}/checkpoints``.
    """

    def __init__(self, dirpath: str) -> None:
        self.path = Path(dirpath).absolute() / "last.ckpt"
        self.received: signal.Signals | None = None
        """The signal that asked this rank to end."""
        self._received_at = 0.0
        self._is_saving = False
        self._previous_handlers: dict[signal.Signals, Any] = {}

    # Asking to end

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for other in self._sharers(trainer):
            # Else it would keep off a ``last.ckpt`` that it did not write itself.
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
        """Only notes the signal: a handler runs between any two instructions of the step."""
        now = time.monotonic()
        if self.received is None:
            self.received, self._received_at = signal.Signals(signum), now
            _write_stderr(
                f"{self.received.name}: ending after this rollout step, with a checkpoint. "
                "Once more to end at once without."
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
        """What it waits for may be long in coming: the step is left undone, to be made anew."""
        self._stop_on_signal(trainer, is_step_unfinished=True)

    def _stop_if_asked(self, trainer: L.Trainer) -> None:
        """Between two optimizer steps a gradient that is being accumulated would be lost."""
        num_batches = trainer.fit_loop.batch_idx + 1
        if num_batches % trainer.accumulate_grad_batches == 0 or trainer.is_last_batch:
            self._stop_on_signal(trainer)

    def _stop_on_signal(self, trainer: L.Trainer, *, is_step_unfinished: bool = False) -> None:
        """All ranks agree on the signal that any of them got."""
        received = torch.tensor(self.received or 0, device=trainer.strategy.root_device)
        signum = int(trainer.strategy.reduce(received, reduce_op="max"))
        if signum:
            num_steps = trainer.fit_loop.total_batch_idx + 1 - is_step_unfinished
            message = (
                f"Ended by {signal.Signals(signum).name} after {num_steps} steps. "
                f"Resume with:\n  {resume_command(self.path)}"
            )
            reason = StopReason(
                exit_code=128 + signum, message=message, is_step_unfinished=is_step_unfinished
            )
            stop_run(trainer, reason)

    # Ending

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
        for other in self._sharers(trainer):
            # Else it would write the file again when training ends before its own first save.
            other._last_checkpoint_saved = str(self.path)
        trainer.strategy.barrier("ExitCheckpoint")

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Say that it was saved where the last batch ended: from there Lightning resumes exactly.

        From the end of training it does not: it takes the epoch for done even when it was cut
        short, drops the position of the data loader, and may count a step twice. A step that was
        left undone is taken back, so that the last batch is the one before it.
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

    # Living with others

    def _sharers(self, trainer: L.Trainer) -> list[ModelCheckpoint]:
        """Those that write the same file."""
        return [
            other
            for other in trainer.checkpoint_callbacks
            if isinstance(other, ModelCheckpoint)
            and other.save_last
            and Path(other.dirpath or "").resolve() == self.path.parent.resolve()
        ]


def resume_command(checkpoint: Path) -> str:
    """What goes on from this checkpoint of a run directory."""
    command = next((word for word in sys.argv[1:] if word in ("fit", "sft")), "fit")
    config = checkpoint.parent.parent / "config.yaml"
    words = ["lit-grpo", command, "--config", str(config), "--ckpt_path", str(checkpoint)]
    return shlex.join(words)


def _write_stderr(message: str) -> None:
    """Unbuffered: printing or logging may not be entered twice."""
    os.write(2, f"\n{message}\n".encode())


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _move(source: Path, target: Path) -> None:
    """A file is replaced at once; a directory, as sharded strategies write, makes way first."""
    if target.is_dir() and not target.is_symlink():
        old = target.with_name(target.name + ".old")
        _remove(old)
        target.rename(old)
        source.rename(target)
        _remove(old)
    else:
        os.replace(source, target)
