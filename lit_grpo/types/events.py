"""What callbacks are told, and what a callback says when it ends a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One finished phase of a rollout step, as callbacks see it in ``on_stage_end``."""

    name: str
    """generation, reward, logprob, update, micro_batch, weight_sync, evaluation."""
    seconds: float
    micro_batch: int | None = None
    """Number of the micro-batch within the rollout step, from 0, when the stage is one."""
    details: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StopReason:
    """Why a run ended before its last step; the command line exits with ``exit_code``.

    It is set by ``stopping.stop_run``.
    """

    exit_code: int
    message: str
    is_step_unfinished: bool = False
    """The rollout step in flight was not trained on: a resumed run makes it again."""
