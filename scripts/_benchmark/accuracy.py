"""Measure the time to a held-out accuracy on the built-in task, from one warmed-up model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from _benchmark.processes import Repetitions, TrainerProcess, Trainers, started, time_in_turns
from _benchmark.results import Result
from _benchmark.trainers import LitTask, TrlTask, lit_grpo, trl
from _warm_up import warm_up

TARGET = 0.25
ACCURACY = 0.98
EVALUATE_EVERY = 10
TRL_MICRO_BATCH_ROWS = (1024, 256, 128)
MICRO_BATCH_REPETITIONS = Repetitions(rounds=1, steps=3)


def compare_accuracy(start: Path | None) -> Iterator[Result]:
    """Train the quickstart with this project and with TRL, up to the accuracy or its last step.

    Args:
        start: A warmed-up model; None runs the quickstart's warm-up.
    """
    from lit_grpo.cli.parsing.config_files import find_config, read_config

    with TemporaryDirectory() as name:
        directory = Path(name)
        start = start or warm_up(directory / "warm_up")
        quickstart = read_config(find_config("quickstart"))
        rows = fastest_micro_batch(start, quickstart, directory)
        trainers: Trainers = {
            "lit-grpo": (lit_grpo, lit_task(start, directory)),
            "trl": (trl, trl_task(start, quickstart, rows, directory)),
        }
        with started(trainers, directory) as processes:
            runs = [AccuracyRun(process) for process in processes.values()]
            train_in_turns(runs, quickstart["trainer"]["max_steps"])
    ours, theirs = runs
    yield Result(
        figure="accuracy",
        case=f"{ACCURACY} on two-digit addition",
        against=f"TRL with micro-batches of {rows} rows",
        ours=ours.seconds if ours.reached_target else float("inf"),
        other=theirs.seconds,
        unit="s",
        target=TARGET,
        details={run.process.name: run.summary() for run in runs},
    )


@dataclass
class AccuracyRun:
    """One trainer's run up to the accuracy. Evaluations are not timed."""

    process: TrainerProcess
    seconds: float = 0.0
    steps: int = 0
    curve: dict[int, float] = field(default_factory=dict)
    """Number of steps -> accuracy."""

    @property
    def reached_target(self) -> bool:
        return any(accuracy >= ACCURACY for accuracy in self.curve.values())

    def evaluate(self) -> None:
        self.curve[self.steps] = self.process.evaluate()

    def train(self, num_steps: int) -> None:
        """Make steps, then evaluate."""
        self.seconds += sum(timing.seconds for timing in self.process.run_steps(num_steps))
        self.steps += num_steps
        self.evaluate()

    def summary(self) -> dict[str, Any]:
        curve = " ".join(f"{step}:{accuracy:.3f}" for step, accuracy in self.curve.items())
        return {
            "seconds": self.seconds,
            "steps": float(self.steps),
            "step": self.process.seconds,
            "reached": "yes" if self.reached_target else "no",
            "accuracy by step": curve,
        }


def train_in_turns(runs: list[AccuracyRun], max_steps: int) -> None:
    """Train until each run has reached the accuracy or has made all its steps."""
    for run in runs:
        run.evaluate()
    for _ in range(max_steps // EVALUATE_EVERY):
        for run in runs:
            if not run.reached_target:
                run.train(EVALUATE_EVERY)


def lit_task(start: Path, directory: Path) -> LitTask:
    """Return the quickstart without its own evaluation, which would be timed."""
    overrides = {
        "trainer": {"limit_val_batches": 0},
        "model": {"policy": {"path": str(start)}},
    }
    return LitTask(directory=directory / "lit-grpo", config=overrides)


def trl_task(start: Path, quickstart: dict[str, Any], rows: int, directory: Path) -> TrlTask:
    """Return the quickstart's settings under the names that TRL gives them."""
    from lit_grpo.data import AdditionData

    model, data = quickstart["model"], quickstart["data"]["init_args"]
    optimizer = model["optimizer"]["init_args"]
    num_rows = data["prompts_per_step"] * model["group_size"]
    settings = {
        "max_steps": quickstart["trainer"]["max_steps"],
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": num_rows // rows,
        "num_generations": model["group_size"],
        "max_completion_length": model["sampling"]["max_tokens"],
        "learning_rate": optimizer["lr"],
        "adam_beta1": optimizer["betas"][0],
        "adam_beta2": optimizer["betas"][1],
        "weight_decay": optimizer["weight_decay"],
        "lr_scheduler_type": model["lr_schedule"],
        "warmup_steps": model["warmup_steps"],
        "scale_rewards": "none",
        "loss_type": "dapo",
    }
    sums = AdditionData(validation_size=data["validation_size"]).rows("train")
    return TrlTask(
        model=start,
        directory=directory / f"trl-{rows}",
        reward=math_reward,
        rows=[dict(row.columns) for row in sums],
        settings=settings,
    )


def fastest_micro_batch(start: Path, quickstart: dict[str, Any], directory: Path) -> int:
    """Return the micro-batch rows with which TRL is fastest."""
    trainers: Trainers = {
        str(rows): (trl, trl_task(start, quickstart, rows, directory))
        for rows in TRL_MICRO_BATCH_ROWS
    }
    with started(trainers, directory) as processes:
        time_in_turns(processes, MICRO_BATCH_REPETITIONS)
    return int(min(processes.values(), key=lambda process: process.seconds).name)


@cache
def _started_math_reward() -> Any:
    from lit_grpo.rewards import MathReward

    reward = MathReward()
    reward.start()
    return reward


async def math_reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Score as the quickstart's reward does, in the form that TRL calls."""
    from lit_grpo.types import Completion, Prompt

    reward = _started_math_reward()
    pairs = zip(completions, answer, strict=True)
    return [
        await reward.score(
            Prompt(id="", text="", token_ids=(), answer=gold),
            Completion(token_ids=(), sampler_logprobs=(), text=text, finish_reason="stop"),
        )
        for text, gold in pairs
    ]
