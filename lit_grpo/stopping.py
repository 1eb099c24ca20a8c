"""How a run ends before its last step, and the exit codes of the command line.

Imports neither torch nor Lightning, so that ``lit-grpo --help`` can print the codes at once.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import shlex
import signal
from contextlib import suppress
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import lightning as L

    from lit_grpo.types import StopReason

log = logging.getLogger(__name__)


class ExitCode(IntEnum):
    """Exit codes of ``lit-grpo``; a callback may choose any other in its ``StopReason``.

    A run that a signal ends exits with ``exit_code_of_signal``, as a shell reports it.
    """

    meaning: str

    DONE = 0, "done"
    CRASHED = 1, "crashed, or a reward has a bug; the traceback is in run.log"
    WRONG_INPUT = 2, "wrong command, config or data; one line says what"
    NO_REWARD = (
        3,
        "stopped after many steps in a row without a reward (ZeroRewardBreaker), without a token "
        "to train on, or because a HealthMonitor rule with action: stop applied",
    )
    SCORES_ABSENT = (
        4,
        "stopped: too many scores or completions were missing, a judge's budget is spent, or a "
        "reward with on_error: raise failed",
    )
    ENGINE_FAILED = (
        5,
        "stopped: the rollout engine or the teacher's server gave up, or a server does not have "
        "the policy's weights",
    )
    DIVERGED = (
        6,
        "stopped: gradients were not finite many times in a row, or the policy's logits are not",
    )
    TIME_IS_UP = (
        7,
        "stopped: its time was up before it was done; resume it, or start it with --ckpt_path auto",
    )
    STALLED = 8, "stopped: no progress (by StallWatchdog with action: stop)"
    RANK_LOST = (
        9,
        "another process of the run, or its machine, is gone; start all again with "
        "--ckpt_path auto",
    )
    INTERRUPTED = 130, "interrupted by Ctrl-C"

    def __new__(cls, code: int, meaning: str) -> ExitCode:
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member


PR_SET_PDEATHSIG = 1
"""The option of Linux's ``prctl`` for a signal at the death of the parent."""

SIGNAL_CODE = "128 + n"
SIGNAL_MEANING = "ended by signal n, such as 143 for SIGTERM"


def exit_codes() -> dict[str, str]:
    """Return code -> meaning for all exit codes, of signals too."""
    return {str(code.value): code.meaning for code in ExitCode} | {SIGNAL_CODE: SIGNAL_MEANING}


def exit_code_of_signal(signum: int) -> int:
    """Return the exit code that a shell reports for a process ended by this signal."""
    return 128 + signum


def is_of_signal(exit_code: int) -> bool:
    """Return whether an exit code means that a signal ended the process."""
    return any(exit_code == exit_code_of_signal(one) for one in signal.Signals)


def end_with_launcher() -> None:
    """Let Linux send SIGTERM to this process, if torchrun started it, when torchrun dies.

    torchrun starts ranks in sessions of their own, where they would keep running without it, and
    hold their GPUs and the run directory.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def exit_code_of_error(error: BaseException) -> int:
    """Return the exit code of a run that an error, or a signal as ``SystemExit``, has ended."""
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    from lit_grpo.types import EngineFailed, RankLost, UserError
    from lit_grpo.types.errors import Diverged, as_rank_lost

    error = as_rank_lost(error) or error
    codes: dict[type[BaseException], ExitCode] = {
        KeyboardInterrupt: ExitCode.INTERRUPTED,
        EngineFailed: ExitCode.ENGINE_FAILED,
        Diverged: ExitCode.DIVERGED,
        RankLost: ExitCode.RANK_LOST,
        UserError: ExitCode.WRONG_INPUT,
    }
    found = (code for kind, code in codes.items() if isinstance(error, kind))
    return next(found, ExitCode.CRASHED)


_COMMAND = re.compile(r"lit-grpo (?P<name>[\w-]+) RUN\b(?P<option> --export DIR)?")
_IN_PYTHON = {
    "checkpoints --export DIR": "lit_grpo.export_checkpoint",
    "rewards": "call it on a few completions",
    "fit": 'trainer.fit(…, ckpt_path="last")',
}
"""Command that needs the config of a run -> what is done where a program has made the trainer."""
_AUTO_IN_PYTHON = 'trainer.fit(…, ckpt_path="auto")'
IN_A_CONFIG = " in the config, or in a file that you add with --config FILE"
ROWS_ARE_KEPT = "; the rows that were being scored are in completions/"


def for_this_run(trainer: L.Trainer, text: str) -> str:
    """Return advice with the directory of the run instead of ``RUN`` in commands.

    Where a program has made the trainer, it names calls instead of commands and options, and no
    files if it is Lightning's own, which writes none.
    """
    from lit_grpo.types.paths import shown_path  # torch, which exit codes do not need

    run_dir = Path(trainer.default_root_dir)
    has_config = (run_dir / "config.yaml").exists()

    def named(command: re.Match[str]) -> str:
        option = command["option"] or ""
        in_python = None if has_config else _IN_PYTHON.get(f"{command['name']}{option}")
        return in_python or (
            f"lit-grpo {command['name']} {shlex.quote(shown_path(run_dir))}{option}"
        )

    text = _COMMAND.sub(named, text)
    text = text if logs_run(trainer) else text.replace(ROWS_ARE_KEPT, "")
    if has_config:
        return text
    return text.replace("--ckpt_path auto", _AUTO_IN_PYTHON).replace(IN_A_CONFIG, "")


def logs_run(trainer: L.Trainer) -> bool:
    """Return whether a run's files are written, and its end is logged: not by a plain trainer."""
    return getattr(trainer, "logs_run", False)


def log_stop(trainer: L.Trainer) -> None:
    """Log why a run was stopped, if nothing else does at its end."""
    if (reason := get_stop_reason(trainer)) and trainer.is_global_zero and not logs_run(trainer):
        log.error("%s", reason.message)


def stop_run(trainer: L.Trainer, reason: StopReason) -> None:
    """End the run after this rollout step, without a last validation; the first reason wins.

    Call it on every rank at the same step. The validation is skipped because the engine that would
    generate its completions may be dead, and a scheduler that ends a run does not wait for one.
    Loggers get no row of a step that is left undone. ``min_steps`` and ``min_epochs`` are lifted.

    Raises:
        UserError: the reason is something else, such as a text.
    """
    from lit_grpo.types import StopReason, UserError  # imports torch

    if not isinstance(reason, StopReason):
        raise UserError(
            f"stop_run must get a StopReason, got {reason!r:.80} (scripts read its exit code). "
            "Write stop_run(trainer, StopReason(exit_code=20, message=…)), "
            "which is in lit_grpo.types."
        )
    if get_stop_reason(trainer) is None:
        if trainer.is_global_zero:
            _warn_of_taken(reason.exit_code)
        message = for_this_run(trainer, reason.message)
        trainer.stop_reason = replace(reason, message=message)  # type: ignore[attr-defined]
    trainer.should_stop = True
    # Lightning would go on until these are reached, and begin the undone step again and again.
    trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None
    trainer.limit_val_batches = 0
    if is_step_unfinished(trainer):
        trainer.log_every_n_steps = 0  # type: ignore[attr-defined]


def _warn_of_taken(exit_code: int) -> None:
    """Warn that a plain number is one of `ExitCode`.

    It is used all the same: an error here would let a run crash that was to end with a checkpoint.
    """
    if isinstance(exit_code, ExitCode) or is_of_signal(exit_code):
        return
    for taken in ExitCode:
        if exit_code == taken:
            log.warning(
                'exit code %d of a StopReason is taken: it means "%s" to scripts and in the '
                "report. Choose a number that is not, such as 20, or write ExitCode.%s if that is "
                "what you mean.",
                exit_code,
                taken.meaning,
                taken.name,
            )


def begin_without_stop(trainer: L.Trainer) -> None:
    """Let any trainer have a ``stop_reason`` to read, which is None as long as nothing stops it."""
    if not hasattr(trainer, "stop_reason"):
        trainer.stop_reason = None  # type: ignore[attr-defined]


def get_stop_reason(trainer: L.Trainer) -> StopReason | None:
    """Return why the run was stopped, or None if it was not."""
    return getattr(trainer, "stop_reason", None)


def mark_unfinished_validation(trainer: L.Trainer) -> None:
    """Note in the reason to stop that a resumed run repeats the validation, but no step."""
    reason = get_stop_reason(trainer)
    assert reason is not None
    trainer.stop_reason = replace(  # type: ignore[attr-defined]
        reason, is_step_unfinished=False, is_validation_unfinished=bool(trainer.validating)
    )


def is_validation_unfinished(trainer: L.Trainer) -> bool:
    """Return whether the run was stopped in a validation, which a resumed run repeats."""
    reason = get_stop_reason(trainer)
    return reason is not None and reason.is_validation_unfinished


def is_step_unfinished(trainer: L.Trainer) -> bool:
    """Return whether the run was stopped in a step, which a resumed run repeats."""
    reason = get_stop_reason(trainer)
    return reason is not None and reason.is_step_unfinished


def trim_early_stopping_reason(reason: str) -> str:
    """Return the reason of Lightning's `EarlyStopping` without what it tells the trainer."""
    return reason.removesuffix(" Signaling Trainer to stop.")


def has_taken_last_step(trainer: L.Trainer) -> bool:
    """Return whether the step that has just ended was the last one that the run may take."""
    if 0 <= trainer.max_steps <= trainer.global_step:
        return True
    max_epochs = -1 if trainer.max_epochs is None else trainer.max_epochs
    return 0 <= max_epochs <= trainer.current_epoch + 1 and trainer.is_last_batch


def has_step_limit(trainer: L.Trainer) -> bool:
    """Return whether ``max_steps`` or ``max_epochs`` ends the run, which may be before a step."""
    return trainer.max_steps >= 0 or (trainer.max_epochs is not None and trainer.max_epochs >= 0)


def zero_limit(trainer: L.Trainer) -> str:
    """Return the name of a limit, ``max_steps`` or ``max_epochs``, that is 0; empty if none is."""
    return next((one for one in ("max_steps", "max_epochs") if getattr(trainer, one) == 0), "")


def how_it_ended(trainer: L.Trainer) -> str:
    """Return why training ended, and what callbacks warn of at the end of a run that is done."""
    if stopped := get_stop_reason(trainer):
        return stopped.message
    done, warnings = _how_it_was_done(trainer), warnings_at_end(trainer)
    return " ".join([f"{done.rstrip('.')}.", *warnings]) if warnings else done


def warnings_at_end(trainer: L.Trainer) -> list[str]:
    """Return what callbacks with a ``warning_at_end`` say; nothing of a run that was stopped."""
    callbacks = [] if get_stop_reason(trainer) else trainer.callbacks  # type: ignore[attr-defined]
    found = filter(None, (getattr(one, "warning_at_end", "") for one in callbacks))
    return [for_this_run(trainer, one) for one in found]


def _how_it_was_done(trainer: L.Trainer) -> str:
    step = f"after optimizer step {trainer.global_step}"
    if limit := zero_limit(trainer):
        return f"Nothing was trained: trainer.{limit} is 0. The final model is the initial policy."
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return f"done {step} of a trial run, which keeps no more than its log (fast_dev_run)"
    if 0 <= trainer.max_steps <= trainer.global_step:
        return f"done {step}: max_steps is reached"
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    reasons = (getattr(one, "stopping_reason_message", None) for one in callbacks)
    if reason := next(filter(None, reasons), None):
        return f"ended {step}: {trim_early_stopping_reason(reason)}"
    if trainer.should_stop:
        return f"ended {step}: a callback stopped it"
    return f"done {step}: max_epochs is reached"
