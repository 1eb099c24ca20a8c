"""End a validation that an engine, a reward or a callback cuts short, with a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import lightning as L

from lit_grpo.distributed import any_failure
from lit_grpo.rollout import EngineFailed
from lit_grpo.stopping import ExitCode, get_stop_reason, mark_unfinished_validation, stop_run
from lit_grpo.training.waiting import StepAbandoned
from lit_grpo.types import EngineBug, StopReason, UserCodeFailed


def is_cut_short(trainer: L.Trainer) -> bool:
    """Return whether the run ends before the validation that is running is finished."""
    return trainer.state.fn == "fit" and get_stop_reason(trainer) is not None


@contextmanager
def stops_on_failure(trainer: L.Trainer) -> Iterator[None]:
    """Stop with a checkpoint if a validation fails in training; otherwise raise the error.

    Every rank must enter this context.
    """
    failure: RuntimeError | None = None
    try:
        yield
    except StepAbandoned as abandoned:
        stop_run(trainer, abandoned.reason)
        mark_unfinished_validation(trainer)
        return
    except (EngineFailed, UserCodeFailed) as error:
        failure = error
    failure = any_failure(failure)
    if failure is None:
        return
    if trainer.state.fn != "fit" or trainer.global_step == 0 or trainer.sanity_checking:
        raise failure  # there is no training progress to save
    exit_code, cause = ExitCode.CRASHED, "reward_bug"
    if isinstance(failure, EngineFailed):
        exit_code, cause = ExitCode.ENGINE_FAILED, "engine_outage"
    elif isinstance(failure, EngineBug):
        cause = ""
    message = f"Stopped at an evaluation: {failure}"
    stop_run(trainer, StopReason(exit_code=exit_code, message=message, cause=cause))
    mark_unfinished_validation(trainer)
