"""Write ``run.log`` during a training run, and filter routine messages of libraries."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import lightning as L
from huggingface_hub.utils.logging import set_verbosity_error
from lightning.pytorch.utilities import rank_zero_only
from transformers.utils.logging import disable_progress_bar

from lit_grpo.diagnostics.unlogged_metric import as_unknown_monitor
from lit_grpo.runs.checkpoints.resume_checks import enclosing_run
from lit_grpo.runs.files.events import has_begun
from lit_grpo.runs.files.lock import locked
from lit_grpo.runs.files.log import close_run_log, log_exception, open_run_log
from lit_grpo.runs.launcher import crashed_rank, watch_ranks
from lit_grpo.runs.shutdown.early_signals import exit_on_signal
from lit_grpo.runs.shutdown.resume_hint import RESUME_CALL, how_to_resume
from lit_grpo.runs.shutdown.time_limit import requeue_if_asked
from lit_grpo.runs.trainer_settings import as_wrong_interval
from lit_grpo.stopping import (
    for_this_run,
    get_stop_reason,
    has_taken_last_step,
    how_it_ended,
    warnings_at_end,
    zero_limit,
)
from lit_grpo.types import RankLost
from lit_grpo.types.errors import RankCrashed, as_rank_lost
from lit_grpo.types.paths import shown_path

log = logging.getLogger(__name__)

EXPECTED_WARNINGS = [
    "You have overridden `transfer_batch_to_device`",
    "torch.distributed.nn.functional.all_gather is deprecated",
    "does not have many workers",
    "`isinstance.treespec, LeafSpec.` is deprecated",
    "Checkpoint directory .* exists and is not empty",
    "The dirpath has changed from .* Only `best_model_path` will be reloaded",
    "`(is_)?gradient_checkpointing(_enable)?` is deprecated",
    "Total length of `.*` across ranks is zero",
    "Using ModelCheckpoint with manual optimization and every_n_train_steps",
    "Found .* in eval mode at the start of training",
    "Be aware that when using `ckpt_path`, callbacks used to create the checkpoint",
    r"\s*Dump of a value that does not round-trip: a tuple is serialized as list",  # as in defaults
    "It is recommended to use `self.log\\('val/.*, sync_dist=True",
]
"""Warnings of libraries about what this project does on purpose."""


@contextmanager
def logged_run(trainer: L.Trainer, run_dir: Path, resume_with: str) -> Iterator[None]:
    """Write ``run.log`` during a training run; its end says why it ended and how to resume.

    Args:
        resume_with: The command or call that resumes the run.

    Raises:
        UserError: another process trains in the directory.
    """
    watch_ranks(trainer)
    lock = locked(run_dir) if trainer.global_rank == 0 else nullcontext()
    with lock, _run_log(trainer, run_dir, resume_with), exit_on_signal(trainer):
        yield


@contextmanager
def _run_log(trainer: L.Trainer, run_dir: Path, resume_with: str) -> Iterator[None]:
    run_log = open_run_log(run_dir, trainer.global_rank)
    trainer.logs_run = True  # type: ignore[attr-defined]
    is_done = False
    try:
        _warn_of_nesting(run_dir)
        yield
        _log_no_step_left(trainer, in_python=resume_with == RESUME_CALL)
        level = logging.WARNING if warnings_at_end(trainer) else logging.INFO
        rank_zero_only(log.log)(level, "%s", how_it_ended(trainer))
        _warn_of_failures(run_dir)
        requeue_if_asked(trainer)
        is_done = get_stop_reason(trainer) is None
    except Exception as error:
        if (reason := get_stop_reason(trainer)) is not None:  # which the error would hide
            rank_zero_only(log.error)("The run was about to end: %s", reason.message)
        log_exception(run_log)
        reworded = (
            _as_lost(error, trainer)
            or as_unknown_monitor(error, trainer)
            or as_wrong_interval(error)
        )
        if reworded is not None:
            if resume_with == RESUME_CALL:
                reworded = type(reworded)(for_this_run(trainer, str(reworded)))
            raise reworded from error
        raise
    finally:
        may_go_on = not is_done and has_begun(trainer)  # else it fails in the same way again
        if may_go_on and (advice := how_to_resume(trainer, run_dir, resume_with)):
            rank_zero_only(log.info)("%s", advice)
        close_run_log(run_log)


@rank_zero_only
def _log_no_step_left(trainer: L.Trainer, *, in_python: bool) -> None:
    """Log that a resumed run took no step, if so, and what to set so that it does."""
    if get_stop_reason(trainer) or has_begun(trainer) or zero_limit(trainer):
        return
    are_changes = bool(getattr(trainer.lightning_module, "changes", ()))
    level = logging.WARNING if are_changes else logging.INFO
    effect = ", so that no change was applied" if are_changes else ""
    is_early = trainer.should_stop and not has_taken_last_step(trainer)
    key = "max_steps" if in_python else "trainer.max_steps"
    remedy = "" if is_early else f": raise {key} (or max_epochs) to go on"
    log.log(level, "no step was left to take%s%s", effect, remedy)


@rank_zero_only
def _warn_of_nesting(run_dir: Path) -> None:
    """Log that a run's directory is inside another run's, which may be deleted or copied."""
    if (outer := enclosing_run(run_dir)) is not None:
        log.warning(
            "run_dir %s is inside another run, %s, and is moved or deleted with it. To keep them "
            "apart set run_dir to a directory beside it.",
            shown_path(run_dir),
            outer,
        )


def _as_lost(error: Exception, trainer: L.Trainer) -> RankLost | RankCrashed | None:
    """Return an error that is due to another process in words for the user."""
    lost = as_rank_lost(error)
    if lost is None or not (rank := crashed_rank(trainer)):
        return lost
    return RankCrashed(
        f"rank {rank} has crashed, and the run with it: the end of its output says why, as does "
        f"run_rank{rank}.log. Remove the cause; then start all processes again with --ckpt_path "
        "auto."
    )


@rank_zero_only
def _warn_of_failures(run_dir: Path) -> None:
    """Log which rewards failed on more than a few rows, and which accuracies leave rows out."""
    from lit_grpo.runs.report.failures import (
        SHOWN_FRACTION,
        describe_failures,  # pandas, which training does not need
    )
    from lit_grpo.runs.report.held_out import describe_unscored
    from lit_grpo.runs.report.history import load_runs

    if (run_dir / "metrics.csv").exists():
        (run,) = load_runs([Path(shown_path(run_dir))])
        unscored = describe_unscored(run, above=SHOWN_FRACTION)
        for line in [*describe_failures(run), *(f"{one[0].upper()}{one[1:]}" for one in unscored)]:
            log.warning("%s", line)


def silence_chatter() -> None:
    """Silence tips, hardware lists, short-lived progress bars and expected warnings."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", f".*{message}")
    set_verbosity_error()  # type: ignore[no-untyped-call]  # the Hub's errors are raised
    disable_progress_bar()
