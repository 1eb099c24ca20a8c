"""Say which metrics there are when a callback watches one that there is not."""

from __future__ import annotations

import re

import lightning as L

from lit_grpo.diagnostics.monitors import describe_unknown
from lit_grpo.types import UserError

OF_LIGHTNING = {
    "EarlyStopping": re.compile(r"Early stopping conditioned on metric `(.+?)` which is not avail"),
    "ModelCheckpoint": re.compile(r"`ModelCheckpoint\(monitor='(.+?)'\)` could not find the monit"),
}
"""Callback -> what it says when there is no such metric."""


def as_unknown_monitor(error: BaseException, trainer: L.Trainer) -> UserError | None:
    """Return an error of Lightning's about an unknown metric in words for the user, else None."""
    matches = {kind: one.match(str(error)) for kind, one in OF_LIGHTNING.items()}
    kind, name = next(((kind, one[1]) for kind, one in matches.items() if one), ("", ""))
    if not kind:
        return None
    return UserError(f"{describe_unknown(kind, name, trainer.callback_metrics)}.")
