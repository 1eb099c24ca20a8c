"""Measure a whole GRPO step against TRL's, its update against a bare one, and the overhead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
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
from _benchmark.workloads import SIZES, WORKLOADS, ModelSize, Workload, varied_reward, write_inputs

STEP_TARGETS = {"short_equal": 0.9, "short_varied": 0.6, "long_shared": 0.3}
UPDATE_TARGET = 1.10
OVERHEAD_TARGET = 0.02
GPU_SIZES = ("0.5b", "1.5b")
PEAK_TFLOPS = {"H100": 989, "H200": 989, "A100": 312, "L40S": 362, "4090": 165}
"""Part of the device's name -> its peak in dense bfloat16."""


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


def compare_on_gpu(repetitions: Repetitions) -> Iterator[Result]:
    """Measure steps and the utilisation of the update with models of 0.5B and 1.5B parameters."""
    for size in GPU_SIZES:
        for workload in WORKLOADS.values():
            for result in compare_steps(workload, SIZES[size], repetitions):
                case = f"{size} {result.case}"
                yield Result(**(vars(result) | {"case": case}))
                if result.figure == "step":
                    yield utilisation(result, case, workload, SIZES[size])


def utilisation(step: Result, case: str, workload: Workload, size: ModelSize) -> Result:
    """Compare the update's model FLOP/s, with every prompt counted once, with the device's peak."""
    ours = min(
        (row for name, row in step.details.items() if name.startswith("lit-grpo")),
        key=lambda row: row["step"],
    )
    tokens = workload.num_prompts * workload.prompt_tokens + workload.num_rows * ours["mean length"]
    name = torch.cuda.get_device_name()
    peak = next((tflops for part, tflops in PEAK_TFLOPS.items() if part in name), float("nan"))
    return Result(
        figure="utilisation",
        case=case,
        against="the device's peak in bfloat16",
        ours=6 * num_parameters(size) * tokens / ours["update"] / 1e12,
        other=peak,
        unit="TFLOP/s",
    )


def num_parameters(size: ModelSize) -> int:
    """Count the parameters of the layers and the head."""
    head_size = size.hidden_size // size.num_heads
    attention = 2 * size.hidden_size * head_size * (size.num_heads + size.num_kv_heads)
    mlp = 3 * size.hidden_size * size.intermediate_size
    return size.num_layers * (attention + mlp) + size.vocab_size * size.hidden_size
