"""Find out what a process is doing: CPU time, GPU, memory and the stacks of its threads."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from contextlib import suppress

import psutil
import torch

BUSY_SHARE = 0.1
"""Share of one core or of a GPU above which something is computed; waits and a progress bar take
less."""
GIB = 2**30


class CPUMeter:
    """The CPU time of this process and of those that it started, such as servers and workers."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []
        """(time, CPU seconds until then)"""

    def sample(self) -> None:
        self._samples.append((time.monotonic(), _cpu_seconds()))

    def share(self) -> float:
        """Return how many cores were used in the later half of the samples; 0 if there are few."""
        later = self._samples[len(self._samples) // 2 :]
        if len(later) < 2:
            return 0.0
        (start, first), (end, last) = later[0], later[-1]
        return max(0.0, last - first) / max(end - start, 1e-6)


def _cpu_seconds() -> float:
    own = psutil.Process()
    total = 0.0
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def select_gpu(device: torch.device) -> None:
    """Let this thread ask about the GPU of its process; a new thread asks about the first."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def is_busy(cpu: CPUMeter) -> bool:
    """Return whether this process, one that it started, or its GPU computes."""
    return max(cpu.share(), _gpu_share() or 0.0) > BUSY_SHARE


def _gpu_share() -> float | None:
    """Return how much of the time the current GPU computes; None if that cannot be told."""
    if not torch.cuda.is_initialized():
        return None
    try:
        return torch.cuda.utilization() / 100
    except Exception:  # without NVML, or by an error of its own, such as on a part of a GPU
        return None


def describe_activity(cpu: CPUMeter) -> str:
    """Return what is used: ``12% of a core, 80% of the GPU; 3.1 GiB of memory, …``."""
    gpu = _gpu_share()
    parts = [f"{cpu.share():.0%} of a core"] + ([] if gpu is None else [f"{gpu:.0%} of the GPU"])
    memory = [
        f"{psutil.Process().memory_info().rss / GIB:.1f} GiB of memory in use",
        f"{psutil.virtual_memory().available / GIB:.1f} GiB left",
    ]
    if torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        memory.append(f"{(total - free) / GIB:.1f} of {total / GIB:.1f} GiB of the GPU in use")
    return f"{', '.join(parts)}; {', '.join(memory)}"


def all_stacks() -> str:
    """Return the stacks of all threads, the main thread first."""
    threads = sorted(threading.enumerate(), key=lambda one: one is not threading.main_thread())
    frames = sys._current_frames()
    return "\n".join(
        f"Thread {thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in threads
        if thread.ident in frames
    )
