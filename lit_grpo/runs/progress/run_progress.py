"""Describe the progress of a run: steps, time left, the stage that is running and its tokens/s."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta

from lit_grpo.types import RunningStage

STAGE_VERBS = {
    "weight_sync": "sync weights",
    "generation": "generate",
    "reward": "score",
    "logprob": "logprobs",
    "update": "update",
    "evaluation": "validate",
}

NUM_TIMED_STEPS = 20
"""Steps over which the time of a step is averaged."""

RATE_SECONDS = 10.0
"""Time over which tokens per second are averaged."""


class RunProgress:
    """The progress of a run: written by the main thread, read by the one that draws.

    Args:
        title: What the run does: training, validation or testing.
        unit: What is counted: steps or batches.
        num_done: Steps before this process.
        total: Steps of the whole run; infinite if there is no limit.
        running_stage: Returns the stage that is running, if any.
        is_paused: Returns whether the run pauses until missing scores are tried again.
    """

    def __init__(
        self,
        title: str,
        unit: str,
        num_done: int,
        total: int | float,
        running_stage: Callable[[], RunningStage | None],
        is_paused: Callable[[], bool] = lambda: False,
    ) -> None:
        self.title = title
        self.unit = unit
        self.num_done = num_done
        self.total = total
        self.metrics = ""
        self.activity = ""
        """Work outside the stages of a step, such as saving a checkpoint."""
        self._batch = ""
        """Which batch of a validation during training is running, if it has several."""
        self._running_stage = running_stage
        self._is_paused = is_paused
        self._started = time.perf_counter()
        self._step_ends: deque[float] = deque(maxlen=NUM_TIMED_STEPS + 1)
        """Start of the first step, then the ends of steps."""
        self._rate = TokenRate()

    def begin_step(self) -> None:
        self.activity = self._batch = ""
        if not self._step_ends:
            self._step_ends.append(time.perf_counter())

    def end_step(self, num_done: int, total: int | float) -> None:
        self._step_ends.append(time.perf_counter())
        self.num_done, self.total = num_done, total

    def begin_validation(self, batch_idx: int, num_batches: int | float) -> None:
        """Show the progress of a validation during training."""
        self.activity = ""
        self._batch = f" (batch {batch_idx + 1}/{num_batches:.0f})" if num_batches > 1 else ""

    @property
    def count(self) -> str:
        return f"{self.num_done}/{_number(self.total)}"

    @property
    def clock(self) -> str:
        """Running time and time left: ``0:01:40 • 0:05:20``."""
        elapsed = clock_time(time.perf_counter() - self._started)
        return f"{elapsed} • {self.time_left or '-:--:--'}"

    @property
    def speed(self) -> str:
        """Seconds per step, not steps per second: a rollout step takes seconds or minutes."""
        seconds = self._seconds_per_step
        return "" if seconds is None else f"{seconds:.2f} s/{self.unit}"

    @property
    def time_left(self) -> str:
        """Time left at the current speed; empty if it cannot be told."""
        seconds = self._seconds_per_step
        if seconds is None or self.total == float("inf"):
            return ""
        num_left = self.total - self.num_done
        in_step = time.perf_counter() - self._step_ends[-1]
        return clock_time(max(num_left * seconds - in_step, (num_left - 1) * seconds, 0.0))

    @property
    def _seconds_per_step(self) -> float | None:
        ends = list(self._step_ends)
        return (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else None

    def doing(self) -> str:
        """Return what is being done now: ``generate 37/128  0:00:12  850 tok/s``."""
        stage = self._running_stage()
        if self.activity or stage is None:
            return self.activity
        progress = stage.progress()
        verb = STAGE_VERBS.get(stage.name, stage.name)
        count = f" {progress.num_done}/{progress.total}" if progress.total else ""
        if self._is_paused():  # all were scored, some without a result
            verb, count = "waiting for missing scores", ""
        seconds = time.perf_counter() - stage.started
        rate = self._rate.update(stage.name, progress.num_tokens)
        clock = clock_time(seconds) if seconds >= 1 else ""
        speed = f"{rate:.0f} tok/s" if rate else ""
        return "  ".join(filter(None, (verb + count + self._batch, clock, speed)))


class TokenRate:
    """Tokens per second of the stage that is running."""

    def __init__(self) -> None:
        self._stage = ""
        self._samples: deque[tuple[float, int]] = deque()
        """(time, tokens) at the start and whenever the count has grown."""

    def update(self, stage: str, num_tokens: int) -> float:
        """Take the current count of a stage; return its rate over the last seconds."""
        samples, now = self._samples, time.perf_counter()
        if stage != self._stage or (samples and num_tokens < samples[0][1]):
            self._stage = stage
            samples.clear()
        if not samples or num_tokens > samples[-1][1]:
            samples.append((now, num_tokens))
        while len(samples) > 2 and samples[1][0] < now - RATE_SECONDS:
            samples.popleft()
        (start, first), (end, last) = samples[0], samples[-1]
        return (last - first) / (end - start) if end > start else 0.0


def clock_time(seconds: float) -> str:
    return str(timedelta(seconds=int(seconds)))


def _number(total: int | float) -> str:
    return "--" if total == float("inf") else f"{total:.0f}"
