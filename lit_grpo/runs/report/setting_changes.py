"""Find which settings a run has changed at its resumes, and after which steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lit_grpo.runs.files.event_log import Event, read_events

Changes = dict[str, tuple[str, str]]
"""Key of a setting -> its value before and after."""


def describe_changes(run_dir: Path) -> str:
    """Return which settings of the model and the data changed after which step."""
    by_step: dict[int, Changes] = {}
    for event in resumes_in_effect(read_events(run_dir)):
        by_step[event.step] = _combined(by_step.get(event.step, {}), _parsed(event.changes))
    return "; ".join(
        f"{key} {before} -> {after} after step {step}"
        for step, changes in by_step.items()
        for key, (before, after) in changes.items()
        if key.startswith(("model.", "data."))
    )


def resumes_in_effect(events: Sequence[Event]) -> list[Event]:
    """Return the start and the resumes of a run that its steps come from.

    A resume replaces earlier ones from the same step or a later one, as it repeats the steps that
    followed them. One that was stopped before its first step is kept: the stop has saved its
    settings, and the next resume goes on with them.
    """
    kept: list[Event] = []
    last_stop = -1
    for event in events:
        if event.kind == "start":
            kept = [event]
        elif event.kind == "resume":
            first_undone = event.step + (event.step == last_stop)
            kept = [*(one for one in kept if one.step < first_undone), event]
            last_stop = -1
        elif event.kind == "stop":
            last_stop = event.step
    return kept


def _parsed(changes: Sequence[str]) -> Changes:
    """Read ``key: before -> after``."""
    found: Changes = {}
    for change in changes:
        key, _, values = change.partition(": ")
        before, _, after = values.partition(" -> ")
        found[key] = before, after
    return found


def _combined(earlier: Changes, later: Changes) -> Changes:
    """Return both as one; what a later one takes back is left out."""
    combined = earlier | {
        key: (earlier.get(key, (before, ""))[0], after) for key, (before, after) in later.items()
    }
    return {key: (before, after) for key, (before, after) in combined.items() if before != after}
