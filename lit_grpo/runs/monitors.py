"""Say which metrics there are when a callback watches one that there is not."""

from __future__ import annotations

import difflib
import re

import lightning as L

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
    return UserError(describe_unknown(kind, name, trainer)) if kind else None


def describe_unknown(kind: str, name: str, trainer: L.Trainer) -> str:
    """Return what is wrong with a callback that watches a metric that nothing logs."""
    logged = sorted(trainer.callback_metrics)
    known = [one for one in logged if one.startswith("val/")] or logged
    close = difflib.get_close_matches(name, logged, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return (
        f"{kind} watches {name}, which nothing logs. Logged are {', '.join(known)}, and "
        f"all columns of metrics.csv.{hint} Correct its monitor in trainer.callbacks."
    )
