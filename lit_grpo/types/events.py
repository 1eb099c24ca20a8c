"""Types that the trainer and its callbacks exchange: running and finished stages, stop reasons."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from lit_grpo.types.field_types import check_fields
from lit_grpo.types.settings import check_range


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProgress:
    """How far a running stage is, on this rank."""

    num_done: int = 0
    total: int = 0
    """Completions that the stage has to handle; 0 if they are not counted."""
    num_tokens: int = 0
    """Tokens so far, for a rate; 0 if they are not counted."""

    def advanced(self, count: int) -> StageProgress:
        """Return the progress after so many further completions."""
        return replace(self, num_done=self.num_done + count)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningStage:
    """A phase of a rollout step that is running, for display."""

    name: str
    started: float
    """``time.perf_counter()`` at its start."""
    progress: Callable[[], StageProgress] = StageProgress
    """Reads the current counts; may be called from another thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One finished phase of a rollout step, as callbacks receive it in ``on_stage_end``."""

    name: str
    """generation, reward, logprob, update, micro_batch, weight_sync or evaluation."""
    seconds: float
    micro_batch: int | None = None
    """Index of the micro-batch within the rollout step, from 0; None for every other stage."""
    details: Mapping[str, float] = field(default_factory=dict)
    """Further measurements of the stage, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopReason:
    """Why a run ends before its last step; the command line exits with ``exit_code``.

    ``stopping.stop_run`` sets it.

    Raises:
        UserError: the exit code is not one that a process can have.
    """

    exit_code: int
    message: str
    cause: str = ""
    """Name of the cause in ``diagnostics.causes``, if one was found; else the exit code says it."""
    is_step_unfinished: bool = False
    """Whether the current rollout step was not trained on; a resumed run then repeats it."""
    is_validation_unfinished: bool = False
    """Whether a validation was left unfinished; a resumed run then repeats it."""

    def __post_init__(self) -> None:
        check_fields("StopReason", self)
        why = "a shell reports exit codes modulo 256"
        check_range("StopReason.exit_code", self.exit_code, at_least=0, at_most=255, why=why)

    def __str__(self) -> str:
        return self.message
