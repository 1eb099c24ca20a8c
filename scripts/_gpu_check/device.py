"""The device that is checked: a GPU, the CPU, or the tests' stand-in for a GPU."""

from __future__ import annotations

import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import torch

DeviceName = Literal["cuda", "pretend", "cpu"]


@dataclass(frozen=True)
class Device:
    """What differs between the devices."""

    name: DeviceName

    @property
    def device(self) -> torch.device:
        return torch.device(self.name if self.name == "cpu" else f"{self.name}:0")

    @property
    def title(self) -> str:
        """What it is, for people; a GPU's own name."""
        if self.name == "cuda":
            return torch.cuda.get_device_name(self.device)
        return {"cpu": "CPU", "pretend": "stand-in for a GPU, which computes on the CPU"}[self.name]

    @property
    def casts(self) -> bool:
        """Whether the device can run float32 weights in bfloat16; the stand-in cannot."""
        return self.name != "pretend"

    @property
    def precision(self) -> Literal["bf16-mixed", "32-true"]:
        """The precision of training runs."""
        return "bf16-mixed" if self.casts else "32-true"

    @property
    def trainer_options(self) -> dict[str, Any]:
        """Return what tells a trainer to use the device."""
        if self.name != "pretend":
            return {"accelerator": self.name, "devices": 1}
        from pretend_device import pretend_strategy

        return {"accelerator": "auto", "strategy": pretend_strategy()}

    @contextmanager
    def usable(self) -> Iterator[None]:
        """Make the device usable within the context."""
        if self.name != "pretend":
            yield
            return
        from pretend_device import pretend_device

        with pretend_device():
            yield

    @contextmanager
    def counted_waits(self) -> Iterator[Counter[str]]:
        """Count the operations for which the host waits for the device, by place in the project.

        On the stand-in within `usable`. The CPU never waits.
        """
        if self.name == "cuda":
            with _waits_for_cuda() as waits:
                yield waits
        elif self.name == "pretend":
            import pretend_device

            pretend_device.waits.clear()
            yield pretend_device.waits
        else:
            yield Counter()

    def synchronize(self) -> None:
        if self.name == "cuda":
            torch.cuda.synchronize()

    def median_seconds(self, run: Callable[[], object], num_runs: int, num_warm_up: int) -> float:
        """Return the median time of a function that runs on the device, after a warm-up."""
        seconds = []
        for _ in range(num_warm_up + num_runs):
            self.synchronize()
            start = time.perf_counter()
            run()
            self.synchronize()
            seconds.append(time.perf_counter() - start)
        return median(seconds[num_warm_up:])

    def take_peak_gb(self) -> float | None:
        """Return the peak of allocated memory since the last call, in units of 2^30 bytes."""
        if self.name != "cuda":
            return None
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak / 2**30


@contextmanager
def _waits_for_cuda() -> Iterator[Counter[str]]:
    """Count the warnings that torch gives at each operation that waits for the GPU.

    Explicit calls of ``torch.cuda.synchronize``, such as at the end of a stage, give none.
    """
    waits: Counter[str] = Counter()

    def count(message: Warning | str, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            waits[place()] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = count
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")


def place() -> str:
    """Return the innermost function of the project that is running."""
    for frame in reversed(traceback.extract_stack()):
        if "/lit_grpo/" in frame.filename:
            return f"{frame.filename.rpartition('/lit_grpo/')[2]} {frame.name}"
    return "elsewhere"
