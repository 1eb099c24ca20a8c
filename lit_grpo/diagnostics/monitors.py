"""Say that a callback watches a metric that nothing logs."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def describe_unknown(kind: str, monitor: str, logged: Iterable[str]) -> str:
    """Return what is wrong with the monitor of a callback, without the full stop.

    Args:
        kind: Class of the callback.
        logged: Names of all metrics, or of those of a validation.
    """
    names = sorted(logged)
    shown = [one for one in names if one.startswith("val/")] or names
    close = difflib.get_close_matches(monitor, names, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return (
        f"{kind} watches {monitor}, which nothing logs. Logged are {', '.join(shown)}, and the "
        f"metrics of a step, the columns of metrics.csv.{hint} Correct its monitor in "
        "trainer.callbacks"
    )
