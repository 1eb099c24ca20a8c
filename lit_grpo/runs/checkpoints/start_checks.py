"""Check before the first step what checkpoints cannot hold, and how they are written."""

from __future__ import annotations

import logging

import lightning as L
from lightning.pytorch.utilities import rank_zero_only

from lit_grpo.distributed.fsdp2 import FSDP2Strategy
from lit_grpo.types.saved_state import saved_state

log = logging.getLogger(__name__)


def warn_if_at_once(trainer: L.Trainer) -> None:
    """Warn that no thread writes the checkpoints of a strategy: only FSDP2 can copy its parts."""
    if not isinstance(trainer.strategy, FSDP2Strategy):
        rank_zero_only(log.warning)(
            "Checkpoints.init_args.in_background has no effect with %s: checkpoints are written "
            "at once, and training waits for them. Set trainer.strategy to fsdp2, or in_background "
            "to false.",
            type(trainer.strategy).__name__,
        )


def refuse_unreadable(trainer: L.Trainer, pl_module: L.LightningModule) -> None:
    """Refuse a state that a checkpoint cannot hold, before the first step.

    Raises:
        UserError: a resumed run could not read it.
    """
    data = getattr(trainer, "datamodule", None)
    of_data = [] if data is None else [data]  # which may have a length, and be empty
    for one in (*trainer.callbacks, *of_data):  # type: ignore[attr-defined]
        saved_state(f"{type(one).__name__}.state_dict()", one.state_dict())
    for owner in (pl_module, *of_data):
        saved_state(f"{type(owner).__name__}.hparams", dict(owner.hparams))
