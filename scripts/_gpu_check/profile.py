"""Count copies and waits between host and device, and tell which operators take the time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from _gpu_check.device import Device
from _gpu_check.findings import Recorder
from torch.profiler import ProfilerActivity, profile

NUM_OPERATORS = 15
COUNTED = {
    "copies to the device": ("Memcpy HtoD",),
    "copies to the host": ("Memcpy DtoH",),
    "synchronisations": ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
    "kernel launches": ("cudaLaunchKernel", "cuLaunchKernel"),
}
"""What is counted -> the beginnings of its names in a profile."""


class Waits:
    """Count the waits for the device of each stage, by place."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.by_stage: dict[str, Counter[str]] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        with self._device.counted_waits() as waits:
            yield
            self.by_stage[name] = self.by_stage.get(name, Counter()) + waits

    def record(self, recorder: Recorder) -> None:
        for stage in ("generation", "update"):
            found = self.by_stage.get(stage, Counter())
            how = "operations for which the host waits, in a step"
            recorder.figure(f"waits, {stage}", found.total(), "", how)
        rows = [
            (stage, place, number)
            for stage, places in self.by_stage.items()
            for place, number in places.most_common(8)
        ]
        recorder.table("where the host waits in a step", ["stage", "place", "waits"], rows)


@contextmanager
def profiled(recorder: Recorder, device: Device, title: str) -> Iterator[None]:
    """Profile the body, and record its copies and its most expensive operators."""
    on_gpu = device.name == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as found:
        yield
        device.synchronize()
    with recorder.attempt(f"profile, {title}"):
        events = list(found.key_averages())
        if on_gpu:
            for name, beginnings in COUNTED.items():
                count = sum(event.count for event in events if event.key.startswith(beginnings))
                recorder.figure(f"{name}, {title}", count, "", "from the profile")
        _record_operators(recorder, events, title, on_gpu=on_gpu)


def _record_operators(recorder: Recorder, events: list[Any], title: str, *, on_gpu: bool) -> None:
    def own_ms(event: Any) -> float:
        """Return the time of an operator without those that it calls."""
        time_us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        return float(time_us) / 1000

    # Kernels have events of their own as well, which would count their time twice.
    shown = [event for event in events if event.device_type.name == "CPU"]
    total = sum(map(own_ms, shown)) or 1.0
    top = sorted(shown, key=own_ms, reverse=True)[:NUM_OPERATORS]
    rows = [
        (event.key[:70], event.count, f"{own_ms(event):.2f}", f"{own_ms(event) / total:.1%}")
        for event in top
    ]
    where = "the GPU" if on_gpu else "the CPU"
    recorder.table(
        f"{title}: operators by their own time on {where}",
        ["operator", "calls", "ms", "share"],
        rows,
    )
