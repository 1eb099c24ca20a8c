"""How a run is ended before its last step, by a callback or by the step itself."""

from __future__ import annotations

import lightning as L

from lit_grpo.types import StopReason

ENGINE_EXIT_CODE = 5
"""Of a command whose rollout engine gave up."""


def stop_run(trainer: L.Trainer, reason: StopReason) -> None:
    """End the run after this rollout step, without a last validation; the first reason wins.

    Every rank must call it at the same step. Whoever stops a run has no time for a validation,
    or what would generate it is dead.
    """
    if get_stop_reason(trainer) is None:
        trainer.stop_reason = reason  # type: ignore[attr-defined]
    trainer.should_stop = True
    trainer.limit_val_batches = 0


def get_stop_reason(trainer: L.Trainer) -> StopReason | None:
    """Why the run was stopped; None while nobody did."""
    return getattr(trainer, "stop_reason", None)
