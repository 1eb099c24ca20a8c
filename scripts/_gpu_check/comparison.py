"""Time steps beside TRL's, as the benchmark does. Needs TRL and this project's command line."""

from __future__ import annotations

import time
from dataclasses import replace

from _benchmark.processes import Repetitions
from _benchmark.steps import compare_steps
from _benchmark.workloads import SIZES, WORKLOADS
from _gpu_check.findings import Recorder

REPETITIONS = Repetitions(rounds=2, steps=2)


def compare(recorder: Recorder, *, is_tiny: bool) -> None:
    """Record ratios of seconds, workload after workload, until the time runs short."""
    sizes = ("tiny",) if is_tiny else ("0.5b", "1.5b")
    names = ("short_equal",) if is_tiny else tuple(WORKLOADS)
    longest = 60.0
    for size in sizes:
        for name in names:
            case = f"{size} {name}"
            if not is_tiny and recorder.seconds_left < 1.3 * longest:
                recorder.skip(f"beside TRL, {case}", f"{recorder.seconds_left:.0f} s were left.")
                continue
            start = time.monotonic()
            workload = replace(
                WORKLOADS[name], micro_batch_rows=WORKLOADS[name].micro_batch_rows[:1]
            )
            with recorder.attempt(f"beside TRL, {case}"):
                for result in compare_steps(workload, SIZES[size], REPETITIONS):
                    what = f"{case}: {result.figure} against {result.against}"
                    how = f"{result.ours:.3f} {result.unit} against {result.other:.3f}"
                    recorder.figure(what, result.ratio, "ratio", how)
            longest = max(longest, time.monotonic() - start)
