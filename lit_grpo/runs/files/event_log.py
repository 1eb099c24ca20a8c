"""Read and write ``events.jsonl`` of a run without importing Lightning, which takes seconds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Literal

NAME = "events.jsonl"
LEAKED = "leaked_prompts"
"""The cause of the warning that held-out prompts are trained on."""

EventKind = Literal[
    "start", "resume", "warning", "alert", "rollback", "stall", "stop", "crash", "done"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a run."""

    time: str
    """ISO 8601, with the time zone."""
    step: int
    """Rollout steps that were finished (for SFT: batches)."""
    kind: EventKind
    message: str = ""
    cause: str = ""
    """Name of the cause in ``diagnostics.causes``; empty if nothing was wrong. A stop that a
    callback of the user's has chosen has its exit code, such as ``exit_code_20``."""
    directory: str = ""
    """The working directory, for a start or a resumption."""
    held_out: str = ""
    """The hash of the held-out prompts, if any, for a start or a resumption."""
    policy: str = ""
    """The path or Hub id of the policy, if it has one, for a start or a resumption."""
    changes: list[str] = field(default_factory=list)
    """Changes since before a resumption, such as ``model.group_size: 4 -> 8``."""
    settings: dict[str, str] = field(default_factory=dict)
    """Section -> checksum of what decides what is learned, for a start or a resumption."""


def now(timespec: str = "seconds") -> str:
    """Return the time as ISO 8601, with the time zone."""
    return datetime.now().astimezone().isoformat(timespec=timespec)


def append_event(run_dir: str | Path, event: Event) -> None:
    """Add an event at the end of the file."""
    path = Path(run_dir) / NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(event), ensure_ascii=False) + "\n")


def read_events(run_dir: str | Path) -> list[Event]:
    """Return the events of a run in their order; lines that a kill has cut short are left out."""
    try:
        text = (Path(run_dir) / NAME).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return []
    return list(_parse(text))


def read_starts(run_dir: str | Path) -> list[Event]:
    """Return the last start of a run and the resumptions since then, in their order."""
    found: list[Event] = []
    for event in read_events(run_dir):
        if event.kind in ("start", "resume"):
            found = [event] if event.kind == "start" else [*found, event]
    return found


def _parse(text: str) -> Iterator[Event]:
    known = {one.name for one in fields(Event)}
    for line in text.splitlines():
        try:
            values = json.loads(line)
            yield Event(**{name: value for name, value in values.items() if name in known})
        except (ValueError, TypeError, AttributeError):
            continue
