"""Run trainers in processes of their own and time them in turns, a few steps each.

Whatever else slows the machine down then slows all of them alike. Nothing here
depends on a trainer.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

TrainFunction = Callable[["StepTimer", Any], None]
"""Trains, calling `StepTimer.next_step` before every step; the second argument is its task."""

Trainers = Mapping[str, tuple[TrainFunction, Any]]
"""Name -> the function that trains, and its task."""

STAGES = ("generation", "reward", "logprob", "update")


@dataclass(frozen=True, kw_only=True)
class Repetitions:
    """How often to measure: ``rounds`` in which each trainer makes ``steps`` steps."""

    rounds: int = 3
    steps: int = 2

    @property
    def num_steps(self) -> int:
        """Steps to configure a trainer for.

        One is a warm-up. One is never requested, so that training does not end before the
        measurement does.
        """
        return self.rounds * self.steps + 2


@dataclass(kw_only=True)
class StepTiming:
    """One step, from its start to the start of the next."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """Of the whole process; other load on the machine hardly changes it."""
    stages: dict[str, float] = field(default_factory=dict)
    mean_length: float = 0.0
    """Tokens of a completion."""
    peak_gb: float = 0.0
    """GPU memory in units of 2^30 bytes; 0 without a GPU."""


class StepTimer:
    """The trainer's end of the connection: run steps on request and time each of them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._steps_left = 0
        self._timings: list[StepTiming] = []
        self._start = self._cpu_start = 0.0
        self.current: StepTiming | None = None
        self.evaluate: Callable[[], float] = lambda: float("nan")
        """Returns the accuracy of the trainer's policy; called between two steps."""

    def next_step(self) -> None:
        """End the timing of the current step, and return when another one is requested.

        Call it at the start of every step and at the end of training. The wait for a request is
        not timed. The process exits when the connection is closed.
        """
        if self.current is not None:
            self.current.seconds = time.perf_counter() - self._start
            self.current.cpu_seconds = time.process_time() - self._cpu_start
            self.current.peak_gb = _take_peak_gb()
            self._timings.append(self.current)
        if not self._steps_left:
            self._wait_for_request()
        self._steps_left -= 1
        self.current = StepTiming()
        self._start, self._cpu_start = time.perf_counter(), time.process_time()

    def add(self, stage: str, seconds: float) -> None:
        """Add seconds to a stage of the current step."""
        if self.current is not None:
            self.current.stages[stage] = self.current.stages.get(stage, 0.0) + seconds

    def set_mean_length(self, mean_length: float) -> None:
        """Record the mean length of the current step's completions."""
        if self.current is not None:
            self.current.mean_length = mean_length

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the body as part of a stage."""
        start = time.perf_counter()
        yield
        self.add(name, time.perf_counter() - start)

    def _wait_for_request(self) -> None:
        self._connection.send(self._timings)
        self._timings = []
        while (request := self._receive()) == "evaluate":
            self._connection.send(self.evaluate())
        self._steps_left = request

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except EOFError:  # the measuring process has closed the connection
            raise SystemExit from None


class TrainerProcess:
    """The measuring process's end of the connection: a trainer that makes steps on request."""

    def __init__(self, name: str, train: TrainFunction, task: Any, directory: Path) -> None:
        self.name = name
        self.timings: list[StepTiming] = []
        self._log = directory / f"{name}.log"
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(train, task, theirs, self._log))
        self._process.start()
        theirs.close()

    def wait_until_ready(self) -> None:
        """Wait until the first step could begin."""
        self._receive()

    def run_steps(self, num_steps: int) -> list[StepTiming]:
        """Let the trainer make steps; return their timings and keep them."""
        timings: list[StepTiming] = self._request(num_steps)
        self.timings += timings
        return timings

    def evaluate(self) -> float:
        """Return the accuracy of the trainer's policy."""
        return float(self._request("evaluate"))

    def close(self) -> None:
        self._connection.close()
        self._process.join()

    @property
    def seconds(self) -> float:
        """Median of a step."""
        return median(timing.seconds for timing in self.timings)

    @property
    def cpu_seconds(self) -> float:
        """Median of a step."""
        return median(timing.cpu_seconds for timing in self.timings)

    @property
    def stages(self) -> dict[str, float]:
        """Median seconds of each stage, and of the rest of a step."""
        steps = [[timing.stages.get(stage, 0.0) for stage in STAGES] for timing in self.timings]
        rest = median(
            timing.seconds - sum(stages) for timing, stages in zip(self.timings, steps, strict=True)
        )
        medians = map(median, zip(*steps, strict=True))
        return dict(zip(STAGES, medians, strict=True)) | {"rest": rest}

    @property
    def mean_length(self) -> float:
        return mean(timing.mean_length for timing in self.timings)

    @property
    def peak_gb(self) -> float:
        return max(timing.peak_gb for timing in self.timings)

    def _request(self, request: Any) -> Any:
        self._connection.send(request)
        return self._receive()

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, ConnectionError):
            tail = "\n".join(self._log.read_text().splitlines()[-30:])
            raise RuntimeError(f"{self.name} ended early. The end of its log:\n{tail}") from None


@contextmanager
def started(trainers: Trainers, directory: Path) -> Iterator[dict[str, TrainerProcess]]:
    """Start trainers, wait until all are ready, and end them on exit."""
    processes: dict[str, TrainerProcess] = {}
    try:
        for name, (train, task) in trainers.items():
            processes[name] = TrainerProcess(name, train, task, directory)
        for process in processes.values():
            process.wait_until_ready()
        yield processes
    finally:
        for process in processes.values():
            process.close()


def time_in_turns(processes: Mapping[str, TrainerProcess], repetitions: Repetitions) -> None:
    """Let each trainer make its steps, round after round, after a warm-up step.

    The order is reversed after every round.
    """
    order = list(processes.values())
    for process in order:
        process.run_steps(1)
        process.timings.clear()
    for _ in range(repetitions.rounds):
        for process in order:
            process.run_steps(repetitions.steps)
        order.reverse()


def _take_peak_gb() -> float:
    if not torch.cuda.is_available():
        return 0.0
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak / 2**30


def _run(train: TrainFunction, task: Any, connection: Connection, log: Path) -> None:
    """Run a trainer in this process, with stdout and stderr in its log."""
    with log.open("wb", buffering=0) as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
        train(StepTimer(connection), task)
