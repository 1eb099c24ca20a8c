"""A whole GRPO step against TRL's, the update against a bare one, and what is neither."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
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
from _benchmark.turns import Contestant, Effort, Entries, Runner, contest, take_turns
from _benchmark.workloads import SIZES, WORKLOADS, ModelSize, Workload, prepare, varied_reward

STEP_TARGETS = {"short_equal": 0.9, "short_varied": 0.6, "long_shared": 0.3}
UPDATE_TARGET = 1.10
OVERHEAD_TARGET = 0.02
GPU_SIZES = ("0.5b", "1.5b")
PEAK_TFLOPS = {"H100": 989, "H200": 989, "A100": 312, "L40S": 362, "4090": 165}
"""Dense bfloat16, by a part of the device's name."""


def compare_steps(workload: Workload, size: ModelSize, effort: Effort) -> Iterator[Result]:
    """The figures of one workload: step, update and overhead."""
    with TemporaryDirectory() as name:
        directory = Path(name)
        prepare(workload, size, effort.num_steps, directory)
        with contest(entries(workload, size, effort, directory), directory) as contestants:
            take_turns(contestants, effort)
    ours, theirs, bare = (_best(contestants, prefix) for prefix in ("lit-grpo", "trl", "bare"))
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
        details={one.name: breakdown(one) for one in contestants.values()},
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


def entries(workload: Workload, size: ModelSize, effort: Effort, directory: Path) -> Entries:
    """Each trainer with every size of its micro-batches: its best will count.

    Where completions end at random there is no bare update of the same tokens.
    """
    runners: dict[str, tuple[Runner, Any]] = {}
    for rows in workload.micro_batch_rows:
        config = step_config(workload, directory, rows, effort.num_steps, size.dtype)
        runners[f"lit-grpo {rows}"] = (
            lit_grpo,
            LitTask(directory=directory / f"lit-grpo-{rows}", config=config),
        )
        runners[f"trl {rows}"] = (
            trl,
            TrlTask(
                model=directory,
                directory=directory / f"trl-{rows}",
                reward=varied_reward,
                dtype=size.dtype,
                settings=step_settings(workload, rows, effort.num_steps),
            ),
        )
        if workload.mean_tokens is None:
            task = BareTask(
                workload=workload, model=directory, micro_batch_rows=rows, dtype=size.dtype
            )
            runners[f"bare {rows}"] = (bare_update, task)
    return runners


def _best(contestants: dict[str, Contestant], prefix: str) -> Contestant | None:
    own = [one for name, one in contestants.items() if name.startswith(prefix)]
    return min(own, key=lambda one: one.seconds, default=None)


def breakdown(contestant: Contestant) -> Row:
    """Where the time of a step goes, in seconds, and what it was spent on."""
    figures = contestant.stages | {
        "step": contestant.seconds,
        "cpu": contestant.cpu_seconds,
        "mean length": contestant.mean_length,
    }
    return figures | ({"peak GB": contestant.peak_gb} if contestant.peak_gb else {})


def compare_on_gpu(effort: Effort) -> Iterator[Result]:
    """Update utilisation and the step of models of usual sizes."""
    for size in GPU_SIZES:
        for workload in WORKLOADS.values():
            for result in compare_steps(workload, SIZES[size], effort):
                case = f"{size} {result.case}"
                yield Result(**(vars(result) | {"case": case}))
                if result.figure == "step":
                    yield utilisation(result, case, workload, SIZES[size])


def utilisation(step: Result, case: str, workload: Workload, size: ModelSize) -> Result:
    """Model FLOP/s of the update, every prompt counted once, against the device's peak."""
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
    """Of the layers and the head."""
    head_size = size.hidden_size // size.num_heads
    attention = 2 * size.hidden_size * head_size * (size.num_heads + size.num_kv_heads)
    mlp = 3 * size.hidden_size * size.intermediate_size
    return size.num_layers * (attention + mlp) + size.vocab_size * size.hidden_size
