"""What the trainer and its callbacks exchange: finished stages and stop reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
    """

    exit_code: int
    message: str
    is_step_unfinished: bool = False
    """Whether the current rollout step was not trained on, so that a resumed run repeats it."""
