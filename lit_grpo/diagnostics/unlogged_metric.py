"""The message for a callback whose monitored metric is never logged."""

from __future__ import annotations

import re
from collections.abc import Iterable

import lightning as L

from lit_grpo.types import UserError
from lit_grpo.types.spelling import did_you_mean

OF_LIGHTNING = {
    "EarlyStopping": re.compile(r"Early stopping conditioned on metric `(.+?)` which is not avail"),
    "ModelCheckpoint": re.compile(r"`ModelCheckpoint\(monitor='(.+?)'\)` could not find the monit"),
}
"""Callback -> what it says when there is no such metric."""


def describe_unknown(kind: str, monitor: str, logged: Iterable[str]) -> str:
    """Return what is wrong with the monitor of a callback, without the full stop.

    Args:
        kind: Class of the callback.
        logged: Names of all metrics, or of a validation's.
    """
    names = sorted(logged)
    of_steps = "the metrics of a step, the columns of metrics.csv"
    shown = ", ".join(one for one in names if one.startswith("val/"))
    mean = f"{monitor}/mean"
    meant = f" Did you mean {mean}?" if mean in names else did_you_mean(monitor, names)
    return (
        f"{kind} watches {monitor}, which nothing logs. Logged are "
        f"{f'{shown}, and ' if shown else ''}{of_steps}.{meant} Correct its monitor in "
        "trainer.callbacks"
    )


def as_unknown_monitor(error: BaseException, trainer: L.Trainer) -> UserError | None:
    """Return an error of Lightning's about an unknown metric in words for the user, else None."""
    matches = {kind: one.match(str(error)) for kind, one in OF_LIGHTNING.items()}
    kind, name = next(((kind, one[1]) for kind, one in matches.items() if one), ("", ""))
    if not kind:
        return None
    return UserError(f"{describe_unknown(kind, name, trainer.callback_metrics)}.")
