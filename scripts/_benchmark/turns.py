"""Trainers in processes of their own that take turns: so many steps each, round after round.

Whatever disturbs the machine then disturbs all of them. Knows no trainer.
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

Runner = Callable[["Metronome", Any], None]
"""Trains until its metronome ends the process; told what to train by its second argument."""

Entries = Mapping[str, tuple[Runner, Any]]
"""Trainers that take turns, and what each is told, by name."""

STAGES = ("generation", "reward", "logprob", "update")


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long to measure: ``rounds`` in which each trainer makes ``steps`` steps."""

    rounds: int = 3
    steps: int = 2

    @property
    def num_steps(self) -> int:
        """With a warm-up, and one that never comes."""
        return self.rounds * self.steps + 2


@dataclass(kw_only=True)
class Lap:
    """One step, from its begin to the begin of the next."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """Of the whole process; unlike ``seconds`` hardly disturbed by others."""
    stages: dict[str, float] = field(default_factory=dict)
    mean_length: float = 0.0
    """Tokens of a completion."""
    peak_gb: float = 0.0
    """Memory on the GPU, in units of 2^30 bytes; 0 without one."""


class Metronome:
    """In a trainer's process: lets it go on for as many steps as it is asked for."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._steps_left = 0
        self._laps: list[Lap] = []
        self._began = self._cpu_began = 0.0
        self.lap: Lap | None = None
        self.measure: Callable[[], float] = lambda: float("nan")
        """What the trainer tells of itself between two steps."""

    def beat(self) -> None:
        """A step begins, or training has ended; waits, off the clock, until steps are wanted."""
        if self.lap is not None:
            self.lap.seconds = time.perf_counter() - self._began
            self.lap.cpu_seconds = time.process_time() - self._cpu_began
            self.lap.peak_gb = _take_peak_gb()
            self._laps.append(self.lap)
        if not self._steps_left:
            self._wait()
        self._steps_left -= 1
        self.lap = Lap()
        self._began, self._cpu_began = time.perf_counter(), time.process_time()

    def add(self, stage: str, seconds: float) -> None:
        if self.lap is not None:
            self.lap.stages[stage] = self.lap.stages.get(stage, 0.0) + seconds

    def had_length(self, mean_length: float) -> None:
        """Of this step's completions."""
        if self.lap is not None:
            self.lap.mean_length = mean_length

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.add(name, time.perf_counter() - start)

    def _wait(self) -> None:
        self._connection.send(self._laps)
        self._laps = []
        while (request := self._receive()) == "measure":
            self._connection.send(self.measure())
        self._steps_left = request

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except EOFError:  # nobody wants more steps
            raise SystemExit from None


class Contestant:
    """In the measuring process: a trainer that makes steps on demand."""

    def __init__(self, name: str, runner: Runner, task: Any, directory: Path) -> None:
        self.name = name
        self.laps: list[Lap] = []
        self._log = directory / f"{name}.log"
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(runner, task, theirs, self._log))
        self._process.start()
        theirs.close()

    def wait_until_ready(self) -> None:
        self._answer()

    def step(self, num_steps: int) -> list[Lap]:
        laps = self._ask(num_steps)
        self.laps += laps
        return laps

    def measure(self) -> float:
        return self._ask("measure")

    def close(self) -> None:
        self._connection.close()
        self._process.join()

    @property
    def seconds(self) -> float:
        return median(lap.seconds for lap in self.laps)

    @property
    def cpu_seconds(self) -> float:
        return median(lap.cpu_seconds for lap in self.laps)

    @property
    def stages(self) -> dict[str, float]:
        """Median seconds of each stage and of the rest of a step."""
        laps = [[lap.stages.get(stage, 0.0) for stage in STAGES] for lap in self.laps]
        rest = median(lap.seconds - sum(parts) for lap, parts in zip(self.laps, laps, strict=True))
        medians = map(median, zip(*laps, strict=True))
        return dict(zip(STAGES, medians, strict=True)) | {"rest": rest}

    @property
    def mean_length(self) -> float:
        return mean(lap.mean_length for lap in self.laps)

    @property
    def peak_gb(self) -> float:
        return max(lap.peak_gb for lap in self.laps)

    def _ask(self, request: Any) -> Any:
        self._connection.send(request)
        return self._answer()

    def _answer(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, ConnectionError):
            tail = "\n".join(self._log.read_text().splitlines()[-30:])
            raise RuntimeError(f"{self.name} ended before its time:\n{tail}") from None


@contextmanager
def contest(entries: Entries, directory: Path) -> Iterator[dict[str, Contestant]]:
    """Start trainers, and end them in any case."""
    contestants: dict[str, Contestant] = {}
    try:
        for name, (runner, task) in entries.items():
            contestants[name] = Contestant(name, runner, task, directory)
        for contestant in contestants.values():
            contestant.wait_until_ready()
        yield contestants
    finally:
        for contestant in contestants.values():
            contestant.close()


def take_turns(contestants: Mapping[str, Contestant], effort: Effort) -> None:
    """Let each make its steps, round after round, after one step that does not count."""
    order = list(contestants.values())
    for contestant in order:
        contestant.step(1)
        contestant.laps.clear()
    for _ in range(effort.rounds):
        for contestant in order:
            contestant.step(effort.steps)
        order.reverse()


def _take_peak_gb() -> float:
    if not torch.cuda.is_available():
        return 0.0
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak / 2**30


def _run(runner: Runner, task: Any, connection: Connection, log: Path) -> None:
    """A process's life; everything it prints goes to its log."""
    with log.open("wb", buffering=0) as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
        runner(Metronome(connection), task)
