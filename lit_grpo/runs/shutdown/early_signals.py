"""Exit at a signal before training has begun, such as while a model loads, or after it has ended.

`StopOnSignal` handles the signals of a training run.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import lightning as L

from lit_grpo.runs.shutdown.signals import (
    SIGNALS,
    is_interactive,
    not_ignored,
    show_cursor,
    stopper,
    write_stderr,
)
from lit_grpo.stopping import exit_code_of_error, exit_code_of_signal

log = logging.getLogger(__name__)

SIGNAL_OF_EXIT = {exit_code_of_signal(signum): signum for signum in SIGNALS}
"""Exit code -> the signal that it stands for."""
EXIT_SECONDS = 10.0
"""Time for the main thread to exit at a signal before a training run has begun."""
WAKE_SECONDS = 1.0
"""After this time a main thread that has not exited is woken: a signal that another thread
receives, or that comes just before a blocking call, does not end the call."""


@contextmanager
def exit_on_signal(trainer: L.Trainer) -> Iterator[None]:
    """Exit with code 128 + signal while no `StopOnSignal` is active.

    A thread sees the signal even if the main thread is in a long call of a library, and ends the
    process if that does not exit in time.

    Raises:
        SystemExit: a signal came; KeyboardInterrupt for Ctrl-C in a notebook.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    is_over, ending = threading.Event(), threading.Lock()
    main_thread = threading.get_ident()

    def wake(signum: int) -> None:
        with ending:  # with the handlers of before, it would end the process
            if not is_over.is_set():
                signal.pthread_kill(main_thread, signum)

    threading.Thread(target=_end_if_stuck, args=[reader, is_over, wake], daemon=True).start()
    previous = {signum: signal.signal(signum, _exit) for signum in not_ignored()}
    previous_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    _writers.add(writer)
    try:
        yield
    except (SystemExit, KeyboardInterrupt) as exiting:
        if (signum := SIGNAL_OF_EXIT.get(exit_code_of_error(exiting))) is not None:
            log.info("Ended by %s, without a new checkpoint.", signum.name)
            if (launcher := trainer.strategy.launcher) is not None:
                launcher.kill(signum)
        raise
    finally:
        with ending:
            is_over.set()
        signal.set_wakeup_fd(previous_fd)
        _writers.discard(writer)
        os.close(writer)
        for signum, handler in previous.items():
            if signal.getsignal(signum) in (_exit, signal.SIG_IGN):
                signal.signal(signum, handler)


_writers: set[int] = set()
"""Where the kernel's signals are written for `_end_if_stuck`."""
_masks: list[set[int]] = []
"""The signals that were blocked before a fork, while one is under way."""


def _hold_signals() -> None:
    """Hold signals back during a fork: the new process must not take this one's handlers."""
    if _writers:
        _masks.append({*signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)})


def _release_signals() -> None:
    if _masks:
        signal.pthread_sigmask(signal.SIG_SETMASK, _masks.pop())


def _forget_in_child() -> None:
    """Let a process that a library forks handle its own signals, and not tell this one of them."""
    if _writers:
        signal.set_wakeup_fd(-1)
        for signum in SIGNALS:
            if signal.getsignal(signum) == _exit:
                is_ctrl_c = signum == signal.SIGINT
                signal.signal(signum, signal.default_int_handler if is_ctrl_c else signal.SIG_DFL)
        _writers.clear()
    _release_signals()


os.register_at_fork(
    before=_hold_signals, after_in_parent=_release_signals, after_in_child=_forget_in_child
)


def _exit(signum: int, frame: FrameType | None) -> None:
    for one in SIGNALS:  # what follows is not repeated
        signal.signal(one, signal.SIG_IGN)
    if signum == signal.SIGINT and is_interactive():
        raise KeyboardInterrupt  # SystemExit would end the session, too
    raise SystemExit(exit_code_of_signal(signum))


def _end_if_stuck(reader: int, is_over: threading.Event, wake: Callable[[int], None]) -> None:
    """Report that a signal has come, and end the process unless the main thread exits in time.

    Args:
        wake: Ends a blocking call of the main thread.
    """
    with open(reader, "rb", buffering=0) as signals:
        while received := signals.read(1):
            signum = received[0]
            if signum not in SIGNALS:
                continue
            if (stopping := stopper(signum)) is not None:
                stopping.notice(signum, time.monotonic())
                continue
            name = signal.Signals(signum).name
            write_stderr(f"{name}: ending now, without a new checkpoint.")
            if not is_over.wait(WAKE_SECONDS):
                wake(signum)
                _end_unless(is_over, signal.Signals(signum))
            return


def _end_unless(is_over: threading.Event, signum: signal.Signals) -> None:
    """End the process if the main thread does not exit in time."""
    if is_over.wait(EXIT_SECONDS):
        return
    saying = threading.Thread(
        target=log.error,
        args=["Ended by %s: its main thread is stuck, so there is no new checkpoint.", signum.name],
        daemon=True,
    )
    saying.start()
    saying.join(WAKE_SECONDS)  # what is stuck may hold the log's lock
    show_cursor()
    os._exit(exit_code_of_signal(signum))
