"""Start the ranks of a machine, and say why the run ends if one of them does."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import torch.distributed
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn

from lit_grpo.diagnostics.causes.table import cause_of_exit
from lit_grpo.runs.files.event_log import read_events
from lit_grpo.runs.shutdown.early_signals import SIGNAL_OF_EXIT
from lit_grpo.runs.shutdown.signals import SIGNALS, handles_signals
from lit_grpo.stopping import ExitCode, exit_code_of_signal, get_stop_reason
from lit_grpo.types import UserError

log = logging.getLogger(__name__)

PARENT_VARIABLE = "LIT_GRPO_RANK_0"
"""Environment variable with the id of the process that has started this rank."""
POLL_SECONDS = 0.2
SAME_ERROR_SECONDS = 5.0
"""Longest time between the same error on two ranks."""
GRACE_SECONDS = 15.0
"""Time for this process to end after another has, before it is considered stuck in a collective."""


class RankLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher of the other ranks of a machine, with a message when one of them ends.

    Lightning's own logs nothing, and sends SIGKILL to all processes 5 seconds after one has failed.
    """

    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: L.Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        """Start the ranks that no other program starts, watch them, and call the function."""
        self.cluster_environment.validate_settings(self.num_processes, self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
                _check_shares(args, self.num_processes * self.num_nodes)
            _check_has_file()
            os.environ[PARENT_VARIABLE] = str(os.getpid())
            self._call_children_scripts()
            del os.environ[PARENT_VARIABLE]  # what this process starts later is not a rank
            watched = (self.procs, trainer)
            threading.Thread(target=end_with_ranks, args=watched, daemon=True).start()
        _set_num_threads_if_needed(self.num_processes)
        is_over = threading.Event()
        if isinstance(self.cluster_environment, LightningEnvironment) and (
            parent := os.environ.get(PARENT_VARIABLE)
        ):
            waiting = (int(parent), is_over)
            threading.Thread(target=end_without_parent, args=waiting, daemon=True).start()
        try:
            return function(*args, **kwargs)
        finally:
            is_over.set()


def is_repeated(run_dir: Path, *, may_be_done: bool) -> bool:
    """Return whether this process is a rank that repeats a training run on one device that is done.

    Each rank of a training run on several devices runs the whole program.

    Args:
        may_be_done: Whether a training run that is done is left out; otherwise it is refused, too.

    Raises:
        UserError: such a process would train in this directory, too.
    """
    is_rank_of_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and os.environ["WORLD_SIZE"] != "1"
    if PARENT_VARIABLE not in os.environ and not is_rank_of_torchrun:
        return False
    events = read_events(run_dir)
    is_done = bool(events) and events[-1].kind == "done"
    if not (may_be_done and is_done):
        raise UserError(
            f"every process of a run on several devices runs the whole program, got one that "
            f"also trains in {run_dir}, on a single device (each of them would train there). Use "
            "the same number of devices for all trainings of a program, or a program for each; "
            'with ckpt_path="auto", an earlier training that is done is not repeated.'
        )
    return True


def ends_with_rank_0() -> bool:
    """Return whether rank 0, if it has started this rank, ends as well before long.

    What has gone wrong on all ranks, such as a file that is not there, is then printed once.
    """
    parent = os.getppid()
    if os.environ.get(PARENT_VARIABLE) != str(parent):
        return False
    deadline = time.monotonic() + SAME_ERROR_SECONDS
    while os.getppid() == parent and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return os.getppid() != parent


def _check_has_file() -> None:
    """Check that the program can be started again, once for each of the other ranks.

    Raises:
        UserError: it came from standard input or from ``python -c``.
    """
    is_module = getattr(sys.modules["__main__"], "__spec__", None) is not None
    if not is_module and sys.argv[0] in ("", "-", "-c"):
        raise UserError(
            "a run on several devices needs a program in a file, since it is started once for "
            f"each device, got one without (python {sys.argv[0]}). Save it in a file, or set "
            "trainer.devices to 1."
        )


def _check_shares(arguments: Sequence[Any], num_processes: int) -> None:
    """Let the data of a training run refuse a number of processes before any is started.

    Raises:
        UserError: they cannot share its batches.
    """
    for one in arguments:
        if isinstance(one, L.LightningDataModule) and hasattr(one, "check_processes"):
            one.check_processes(num_processes)


def end_without_parent(parent: int, is_over: threading.Event) -> None:
    """End this rank if the one that has started it is gone before they form a process group.

    It would wait half an hour for it; within the group it notices closed connections.
    """
    while not (torch.distributed.is_initialized() or is_over.wait(POLL_SECONDS)):
        if _has_ended(parent):
            log.error(
                "Rank 0 of this machine (process %d) has ended before the training, and this rank "
                "with it.",
                parent,
            )
            logging.shutdown()
            os._exit(ExitCode.RANK_LOST)


def _has_ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def watch_ranks(trainer: L.Trainer) -> None:
    """Let the trainer start its ranks with a `RankLauncher`, if it starts any."""
    launcher = trainer.strategy.launcher
    if type(launcher) is _SubprocessScriptLauncher:
        trainer.strategy._launcher = RankLauncher(
            launcher.cluster_environment, launcher.num_processes, launcher.num_nodes
        )


def end_with_ranks(processes: Sequence[subprocess.Popen[bytes]], trainer: L.Trainer | None) -> None:
    """Wait for the other ranks; if one fails, end this process with a message and an exit code.

    A signal that ended the rank is passed on, unless the run is ending already. This process is
    ended after `GRACE_SECONDS`, whatever it does: it may wait for the lost rank for ever.
    """
    while not any(process.poll() for process in processes):
        if all(process.returncode == 0 for process in processes):
            return
        time.sleep(POLL_SECONDS)
    rank, process = next((n, one) for n, one in enumerate(processes, 1) if one.returncode)
    code, words = how_it_ended(process.returncode)
    message = f"Rank {rank} (process {process.pid}) {words}, which ends the run."
    has_signal = process.returncode < 0 or code in SIGNAL_OF_EXIT
    if has_signal and (trainer is None or get_stop_reason(trainer) is None):
        log.error(message)
        if code in SIGNAL_OF_EXIT and not handles_signals():
            os.kill(os.getpid(), SIGNAL_OF_EXIT[code])
    time.sleep(GRACE_SECONDS)
    if not has_signal:  # else it was written above, or the run was ending already
        log.error(message)
    for one in processes:
        one.kill()
    logging.shutdown()
    os._exit(code)


def crashed_rank(trainer: L.Trainer) -> int:
    """Return a rank that this process has started and that has crashed; 0 if there is none."""
    launcher = trainer.strategy.launcher
    processes = launcher.procs if isinstance(launcher, RankLauncher) else []
    deadline = time.monotonic() + SAME_ERROR_SECONDS
    while True:
        codes = [process.poll() for process in processes]
        if ExitCode.CRASHED in codes:
            return codes.index(ExitCode.CRASHED) + 1
        if None not in codes or time.monotonic() > deadline:
            return 0
        time.sleep(POLL_SECONDS)


def how_it_ended(returncode: int) -> tuple[int, str]:
    """Return the run's exit code and a description, given a rank's ``subprocess`` return code."""
    signum = SIGNAL_OF_EXIT.get(returncode, -returncode)
    if signum <= 0:
        code = returncode if returncode in {*ExitCode} else ExitCode.RANK_LOST
        return code, f"ended with exit code {returncode} ({cause_of_exit(returncode)})"
    name = signal.Signals(signum).name
    if signum in SIGNALS:
        return exit_code_of_signal(signum), f"was ended by {name}"
    reason = " (is the machine out of memory?)" if signum == signal.SIGKILL else ""
    return ExitCode.RANK_LOST, f"was killed by {name}{reason}"
