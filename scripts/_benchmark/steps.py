"""Measure a whole GRPO step against TRL's, its update against a bare one, and the overhead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from _benchmark.processes import (
    Repetitions,
    TrainerProcess,
    Trainers,
    TrainFunction,
    started,
    time_in_turns,
)
from _benchmark.results import Result, Row
from _benchmark.trainers import (
    BareTask,
    LitTask,
    TrlTask,
    bare_update,
    lit_grpo,
    step_config,
    step_settings,
    trl,
)
from _benchmark.workloads import ModelSize, Workload, varied_reward, write_inputs

STEP_TARGETS = {"short_equal": 0.5, "short_varied": 0.25, "long_shared": 0.15}
UPDATE_TARGET = 1.05
OVERHEAD_TARGET = 0.02


def compare_steps(
    workload: Workload, size: ModelSize, repetitions: Repetitions
) -> Iterator[Result]:
    """Measure one workload: step, update and overhead."""
    with TemporaryDirectory() as name:
        directory = Path(name)
        write_inputs(workload, size, repetitions.num_steps, directory)
        trainers = make_trainers(workload, size, repetitions, directory)
        with started(trainers, directory) as processes:
            time_in_turns(processes, repetitions)
    ours, theirs, bare = (_fastest(processes, prefix) for prefix in ("lit-grpo", "trl", "bare"))
    assert ours is not None
    assert theirs is not None
    yield Result(
        figure="step",
        case=workload.name,
        against="TRL",
        ours=ours.seconds,
        other=theirs.seconds,
        unit="s",
        target=STEP_TARGETS.get(workload.name),
        details={process.name: breakdown(process) for process in processes.values()},
    )
    if bare is not None:
        yield Result(
            figure="update",
            case=workload.name,
            against="a bare forward and backward",
            ours=ours.stages["update"],
            other=bare.stages["update"],
            unit="s",
            target=UPDATE_TARGET,
        )
    yield Result(
        figure="overhead",
        case=workload.name,
        against="the whole step",
        ours=ours.stages["rest"],
        other=ours.seconds,
        unit="s",
        target=OVERHEAD_TARGET,
    )


def make_trainers(
    workload: Workload, size: ModelSize, repetitions: Repetitions, directory: Path
) -> Trainers:
    """Return each trainer with every micro-batch size; the fastest of each will count.

    Where completions end at random there is no bare update of the same tokens.
    """
    trainers: dict[str, tuple[TrainFunction, Any]] = {}
    for rows in workload.micro_batch_rows:
        config = step_config(workload, directory, rows, repetitions.num_steps, size.dtype)
        trainers[f"lit-grpo {rows}"] = (
            lit_grpo,
            LitTask(directory=directory / f"lit-grpo-{rows}", config=config),
        )
        trainers[f"trl {rows}"] = (
            trl,
            TrlTask(
                model=directory,
                directory=directory / f"trl-{rows}",
                reward=varied_reward,
                dtype=size.dtype,
                settings=step_settings(workload, rows, repetitions.num_steps),
            ),
        )
        if workload.mean_tokens is None:
            task = BareTask(
                workload=workload, model=directory, micro_batch_rows=rows, dtype=size.dtype
            )
            trainers[f"bare {rows}"] = (bare_update, task)
    return trainers


def _fastest(processes: dict[str, TrainerProcess], prefix: str) -> TrainerProcess | None:
    candidates = [process for name, process in processes.items() if name.startswith(prefix)]
    return min(candidates, key=lambda process: process.seconds, default=None)


def breakdown(process: TrainerProcess) -> Row:
    """Return the seconds of a step's stages, the length of its completions and its memory."""
    figures = process.stages | {
        "step": process.seconds,
        "cpu": process.cpu_seconds,
        "mean length": process.mean_length,
    }
    return figures | ({"peak GB": process.peak_gb} if process.peak_gb else {})
