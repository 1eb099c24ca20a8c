"""Run the parts one after the other, each in a process of its own, within the time.

A part that crashes, hangs or breaks the GPU's state for its process does not affect the others.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from _gpu_check.findings import Record, Status, finding, read

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpu_check.py"
MINUTES = 8.0
SHUTDOWN_SECONDS = 5
"""Kept of the whole time to end a process and print the tables."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """When a part may start, and must end.

    Args:
        least: It is skipped when fewer seconds are left.
        most: It has failed when it takes more; of `MINUTES`, and in proportion with other times.
    """

    least: float
    most: float


PARTS = {
    "machine": Times(least=10, most=60),
    "tests": Times(least=30, most=120),
    "equality": Times(least=30, most=90),
    "steps": Times(least=75, most=400),
    "variants": Times(least=40, most=220),
    "trl": Times(least=90, most=400),
}
"""In the order in which they run: the most important first. However long the parts
before `steps` take, it has time for both of its models."""


def run_parts(names: Sequence[str], options: Sequence[str], minutes: float) -> list[Record]:
    """Run these parts; return what they found, with a finding for each that did not end well."""
    end = time.monotonic() + 60 * minutes - SHUTDOWN_SECONDS
    records: list[Record] = []
    for name, times in PARTS.items():
        if name not in names:
            continue
        left = end - time.monotonic()
        if left < times.least:
            reason = f"{max(0.0, left):.0f} s of {minutes:g} minutes were left."
            records.append(finding(name, f"the part {name}", "skipped", reason))
            continue
        print(f"{name} …", file=sys.stderr, flush=True)
        start = time.monotonic()
        most = times.most * minutes / MINUTES
        records += _run(name, options, seconds=min(left, most), is_cut=left < most)
        seconds = {"kind": "figure", "part": name, "name": "the whole part", "unit": "s", "how": ""}
        records.append(seconds | {"value": time.monotonic() - start})
    return records


def _run(name: str, options: Sequence[str], *, seconds: float, is_cut: bool) -> list[Record]:
    """Run a part.

    Args:
        seconds: After which it is killed.
        is_cut: Whether that is because the time for everything ends.
    """
    with TemporaryDirectory() as directory:
        path, log = Path(directory) / "records.jsonl", Path(directory) / "log"
        command = [sys.executable, str(SCRIPT), "--part", name, "--records", str(path)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, *options, "--minutes", str((seconds - SHUTDOWN_SECONDS) / 60)],
                env=os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            has_ended = True
            try:
                ending = f"it exited with {process.wait(seconds)}"
            except subprocess.TimeoutExpired:
                ending, has_ended = f"it did not end within {seconds:.0f} s", False
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        records = read(path)
        if process.returncode != 0:
            tail = " | ".join(log.read_text(errors="replace").splitlines()[-5:])
            status: Status = "failed" if has_ended or not is_cut else "skipped"
            name_of_end = f"the end of the part {name}"
            records.append(finding(name, name_of_end, status, f"{ending}. {tail}"))
        return records
