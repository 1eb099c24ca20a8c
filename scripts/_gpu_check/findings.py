"""What the check found: written by each part as it goes, so that a crash loses nothing."""

from __future__ import annotations

import json
import math
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Status = Literal["passed", "failed", "skipped"]
Record = dict[str, Any]
"""A finding, a figure or a table; ``kind`` says which."""


def finding(part: str, name: str, status: Status, detail: str = "") -> Record:
    return {"kind": "finding", "part": part, "name": name, "status": status, "detail": detail}


@dataclass(frozen=True)
class Recorder:
    """Write the records of one part to a file, one line each.

    Args:
        deadline: When the part has to end, as `time.monotonic` counts.
    """

    part: str
    path: Path
    deadline: float

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def write(self, record: Record) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def figure(self, name: str, value: float | None, unit: str, how: str = "") -> None:
        """Record a number that was measured; None if it could not be."""
        is_number = value is not None and math.isfinite(value)
        record = {"kind": "figure", "part": self.part, "name": name, "unit": unit, "how": how}
        self.write(record | {"value": value if is_number else None})

    def table(self, title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        cells = [[str(cell) for cell in row] for row in rows]
        self.write(
            {"kind": "table", "part": self.part, "title": title, "head": [*head], "rows": cells}
        )

    def decide(self, name: str, value: float, limit: float, why: str) -> None:
        """Record whether a value is at most a limit; NaN is not.

        Args:
            why: The argument for the limit.
        """
        status: Status = "passed" if value <= limit else "failed"
        self.write(finding(self.part, name, status, f"{value:.3g}, limit {limit:.3g}: {why}"))

    def state(self, name: str, holds: bool, detail: str = "") -> None:
        """Record whether a statement holds."""
        self.write(finding(self.part, name, "passed" if holds else "failed", detail))

    def skip(self, name: str, reason: str) -> None:
        self.write(finding(self.part, name, "skipped", reason))

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Record an exception of the body as a failure, and go on after it."""
        try:
            yield
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)[-3:]
            where = ", ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in frames)
            self.state(name, False, f"{type(error).__name__}: {error} (in {where})")


def read(path: Path) -> list[Record]:
    """Read the records of a part; a last line that was cut off is left out."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records
