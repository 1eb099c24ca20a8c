"""What an optimizer takes from a checkpoint: settings that differ, and state that does not fit."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from lit_grpo.distributed.optimizer_class import (
    SETTING,
    earlier_class,
    has_other_optimizer,
    lacks_state,
    optimizer_class,
)
from lit_grpo.training.optimizer.settings import by_key, configured_settings
from lit_grpo.types import UserError
from lit_grpo.types.plain import changed_settings
from lit_grpo.types.saved_state import ALLOW_CHANGES

log = logging.getLogger(__name__)

Settings = Sequence[Mapping[str, Any]]
"""The settings of each group of parameters."""


def changed_optimizer_settings(
    earlier: Settings, now: Settings, *, is_other_class: bool
) -> list[str]:
    """Return what differs in the settings that both optimizers have.

    After a change of class, `foreach` and `fused`, which have other defaults, are left out.
    """
    left_out = {f"{SETTING}.{name}" for name in ("foreach", "fused")} if is_other_class else set()
    before = {key: one for key, one in by_key(earlier).items() if key not in left_out}
    return changed_settings(before, by_key(now))


def refuse_missing_state(checkpoint: Mapping[str, Any], optimizer: Any, earlier: Settings) -> None:
    """Refuse settings of an optimizer that need a state which the checkpoint does not have.

    Another class begins with an empty state, see `leave_out_other_optimizer`.

    Args:
        earlier: The settings with which the checkpoint was written.

    Raises:
        UserError: the class is the same, and its settings need a state that is not there.
    """
    is_other_class = earlier_class(checkpoint) not in (None, optimizer_class(optimizer))
    if is_other_class or not lacks_state(checkpoint, optimizer):
        return
    changes = changed_settings(by_key(earlier), by_key(configured_settings(optimizer)))
    raise UserError(
        f"the optimizer needs a state that the checkpoint does not have: {'; '.join(changes)}. "
        f"Put the settings of the run back. Or {ALLOW_CHANGES}: the optimizer then begins with an "
        "empty state."
    )


def leave_out_other_optimizer(
    checkpoint: dict[str, Any], optimizer: Any, *, loads_itself: bool
) -> bool:
    """Let an optimizer begin with an empty state if a checkpoint's is of no use to it.

    A class keeps the state of those that it lists in ``takes_over``.

    Args:
        loads_itself: Whether the strategy loads the state itself, and has left it out.

    Returns:
        Whether the optimizer begins with an empty state.
    """
    takes_over = () if loads_itself else getattr(optimizer, "takes_over", ())
    before = earlier_class(checkpoint)
    if not has_other_optimizer(checkpoint, optimizer) or before in takes_over:
        return False
    checkpoint["optimizer_states"] = []
    now = optimizer_class(optimizer)
    rank_zero_only(log.info)(
        "%s begins with an empty state: the moments of %s in the checkpoint are of no use to it, "
        "and are dropped",
        *(now, "its settings so far" if before == now else before),
    )
    return True
