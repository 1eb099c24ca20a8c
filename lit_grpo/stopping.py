"""How a run ends before its last step, and the exit codes of the command line.

Imports neither torch nor Lightning, so that ``lit-grpo --help`` can print the codes at once.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import lightning as L

    from lit_grpo.types import StopReason


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
        "stopped: no reward (by ZeroRewardBreaker) or nothing to train on for many steps in a row",
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
    INTERRUPTED = 130, "interrupted by Ctrl-C"

    def __new__(cls, code: int, meaning: str) -> ExitCode:
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member


SIGNAL_CODE = "128 + n"
SIGNAL_MEANING = "ended by signal n, such as 143 for SIGTERM"


def exit_code_of_signal(signum: int) -> int:
    """Return the exit code that a shell reports for a process ended by this signal."""
    return 128 + signum


def exit_code_of_error(error: BaseException) -> ExitCode:
    """Return the exit code of a run that an error has ended."""
    from lit_grpo.types import Diverged, EngineFailed, UserError  # imports torch

    codes: dict[type[BaseException], ExitCode] = {
        KeyboardInterrupt: ExitCode.INTERRUPTED,
        EngineFailed: ExitCode.ENGINE_FAILED,
        Diverged: ExitCode.DIVERGED,
        UserError: ExitCode.WRONG_INPUT,
    }
    found = (code for kind, code in codes.items() if isinstance(error, kind))
    return next(found, ExitCode.CRASHED)


def stop_run(trainer: L.Trainer, reason: StopReason) -> None:
    """End the run after this rollout step, without a last validation; the first reason wins.

    Call it on every rank at the same step. The validation is skipped because the engine that would
    generate its completions may be dead, and a scheduler that ends a run does not wait for one.
    """
    if get_stop_reason(trainer) is None:
        trainer.stop_reason = reason  # type: ignore[attr-defined]
    trainer.should_stop = True
    trainer.limit_val_batches = 0


def get_stop_reason(trainer: L.Trainer) -> StopReason | None:
    """Return why the run was stopped, or None if it was not."""
    return getattr(trainer, "stop_reason", None)
