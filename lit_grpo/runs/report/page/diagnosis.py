"""Diagnose a run and how it ended, from its events and the restarts of its servers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from lit_grpo.runs.files.event_log import Event, EventKind, read_events
from lit_grpo.runs.report.failures import describe_failures
from lit_grpo.runs.report.history import Run
from lit_grpo.runs.report.page.completions import shorten

RESTARTS = "rollout/restarts"
NO_CAUSE = "(no cause given)"
MAX_CHARACTERS = 1000
"""Characters shown of a line of ``run.log``."""
ENDS = {"done": "Done.", "stop": "Stopped.", "crash": "Crashed."}
"""Kinds of events that end a run, and what is said of one without a message."""
UNREMARKABLE = ("start", "done")
"""Kinds of events that are not drawn into the charts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """An event on the axis of steps."""

    run: int
    """Number of the run on the page."""
    step: int
    kind: str
    time: str = ""
    message: str = ""
    cause: str = ""
    is_drawn: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseOccurrences:
    """Alerts, or warnings, with the same cause."""

    name: str
    kind: str
    """``alert`` or ``warning``."""
    num_events: int
    first_step: int
    last_step: int
    message: str
    """Message of the last event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """How a run ended, and what had gone wrong before."""

    label: str
    state: str
    """A kind in `ENDS`, ``running``, or ``unknown``."""
    end: str
    failures: list[str]
    """Sentences about rewards that failed."""
    causes: list[CauseOccurrences]
    """The causes of alerts, then of warnings, each with the most frequent first."""


def find_marks(number: int, run: Run) -> list[Mark]:
    """Return the events of a run within its steps, restarts of servers included, by step."""
    marks = [
        Mark(
            run=number,
            step=event.step,
            kind=event.kind,
            time=_clock_time(event.time),
            message=event.message or "; ".join(event.changes),
            cause=event.cause,
            is_drawn=event.kind not in UNREMARKABLE,
        )
        for event in read_events(run.path)
        if event.step <= run.num_steps
    ]
    return sorted([*marks, *_restarts(number, run)], key=lambda mark: mark.step)


def _restarts(number: int, run: Run) -> Iterator[Mark]:
    restarts = run.values(RESTARTS) if run.has(RESTARTS) else pd.Series(dtype=float)
    for step, count in zip(restarts.index, restarts, strict=True):
        if count > 0:
            message = f"{count:.0f} restart{'' if count == 1 else 's'} of inference servers"
            yield Mark(run=number, step=int(step), kind="restart", message=message)


def diagnose(run: Run) -> Diagnosis:
    events = read_events(run.path)
    state, end = _end(run, events, is_running=run.is_live)
    return Diagnosis(
        label=run.label,
        state=state,
        end=end,
        failures=describe_failures(run),
        causes=[*_causes(events, "alert"), *_causes(events, "warning")],
    )


def _end(run: Run, events: list[Event], *, is_running: bool) -> tuple[str, str]:
    """Return the state of a run and a sentence on its end."""
    if is_running:
        step = "" if run.num_steps else "; it has not finished its first step"
        return "running", f"A process trains in this directory{step}."
    if not events and run.num_steps == 0:
        said = _last_line(run.path / "run.log")
        return "unknown", "It ended before training began." + (f" {said}" if said else "")
    if not events:
        return "unknown", "It has no events.jsonl, so how it ended is not known. See run.log."
    last = events[-1]
    if last.kind not in ENDS:
        step = f"step {max(last.step, run.num_steps)}"
        if run.num_steps == run.read_up_to:  # the file may have further rows
            step += " or later"
        return "unknown", f"No end was recorded after {step}: its process was killed."
    return last.kind, last.message or ENDS[last.kind]


def _last_line(log: Path) -> str:
    """Return the last line of a log, where a traceback has its error; empty if it has none."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"The last line of run.log: {shorten(last, MAX_CHARACTERS)}" if last else ""


def _causes(events: list[Event], kind: EventKind) -> list[CauseOccurrences]:
    by_cause: defaultdict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.kind == kind:
            by_cause[event.cause or NO_CAUSE].append(event)
    causes = [
        CauseOccurrences(
            name=name,
            kind=kind,
            num_events=len(found),
            first_step=found[0].step,
            last_step=found[-1].step,
            message=found[-1].message,
        )
        for name, found in by_cause.items()
    ]
    return sorted(causes, key=lambda cause: -cause.num_events)


def _clock_time(time: str) -> str:
    """Return ``2026-11-23 16:05:01`` of a time in ISO 8601."""
    return time[:19].replace("T", " ")
