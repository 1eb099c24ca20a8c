"""Time to a held-out accuracy on the built-in task, from the same warmed-up model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from _benchmark.results import Result
from _benchmark.trainers import LitTask, TrlTask, lit_grpo, trl
from _benchmark.turns import Contestant, Effort, Entries, contest, take_turns

TARGET = 0.5
ACCURACY = 0.98
EVALUATE_EVERY = 10
TRL_MICRO_BATCH_ROWS = (1024, 256, 128)
PROBE = Effort(rounds=1, steps=3)


def compare_accuracy(start: Path | None) -> Iterator[Result]:
    """The quickstart, by this project and by TRL, to the accuracy or to its last step.

    Args:
        start: A warmed-up model; made by the quickstart's warm-up when None.
    """
    with TemporaryDirectory() as name:
        directory = Path(name)
        start = start or warm_up(directory / "warm_up")
        quickstart = bundled("quickstart")
        rows = best_micro_batch(start, quickstart, directory)
        entries: Entries = {
            "lit-grpo": (lit_grpo, lit_task(start, directory)),
            "trl": (trl, trl_task(start, quickstart, rows, directory)),
        }
        with contest(entries, directory) as contestants:
            races = [Race(contestant) for contestant in contestants.values()]
            run(races, quickstart["trainer"]["max_steps"])
    ours, theirs = races
    yield Result(
        figure="accuracy",
        case=f"{ACCURACY} on two-digit addition",
        against=f"TRL with micro-batches of {rows} rows",
        ours=ours.seconds if ours.has_arrived else float("inf"),
        other=theirs.seconds,
        unit="s",
        target=TARGET,
        details={race.contestant.name: race.summary() for race in races},
    )


@dataclass
class Race:
    """One trainer on its way to the accuracy; evaluations are off its clock."""

    contestant: Contestant
    seconds: float = 0.0
    steps: int = 0
    curve: dict[int, float] = field(default_factory=dict)
    """Accuracy by the steps that were made."""

    @property
    def has_arrived(self) -> bool:
        return any(accuracy >= ACCURACY for accuracy in self.curve.values())

    def go_on(self, num_steps: int) -> None:
        self.seconds += sum(lap.seconds for lap in self.contestant.step(num_steps))
        self.steps += num_steps
        self.curve[self.steps] = self.contestant.measure()

    def summary(self) -> dict[str, Any]:
        curve = " ".join(f"{step}:{accuracy:.3f}" for step, accuracy in self.curve.items())
        return {
            "seconds": self.seconds,
            "steps": float(self.steps),
            "step": self.contestant.seconds,
            "arrived": "yes" if self.has_arrived else "no",
            "accuracy by step": curve,
        }


def run(races: list[Race], max_steps: int) -> None:
    """In turns, until each has arrived or has made all its steps."""
    for race in races:
        race.curve[0] = race.contestant.measure()
    for _ in range(max_steps // EVALUATE_EVERY):
        for race in races:
            if not race.has_arrived:
                race.go_on(EVALUATE_EVERY)


def warm_up(run_dir: Path) -> Path:
    """The quickstart's own, by its command."""
    arguments = ["sft", "--config", "quickstart_sft", "--run_dir", str(run_dir)]
    subprocess.run([sys.executable, "-m", "lit_grpo", *arguments], check=True, capture_output=True)
    return run_dir / "final"


def bundled(name: str) -> dict[str, Any]:
    """A config that ships."""
    import lit_grpo

    path = Path(lit_grpo.__file__).parent / "configs" / f"{name}.yaml"
    return yaml.safe_load(path.read_text())


def lit_task(start: Path, directory: Path) -> LitTask:
    """The quickstart as it is, but that the benchmark evaluates, off the clock."""
    overrides = {
        "trainer": {"limit_val_batches": 0},
        "model": {"policy": {"path": str(start)}},
    }
    return LitTask(directory=directory / "lit-grpo", config=overrides)


def trl_task(start: Path, quickstart: dict[str, Any], rows: int, directory: Path) -> TrlTask:
    """The quickstart's settings in TRL's words."""
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


def best_micro_batch(start: Path, quickstart: dict[str, Any], directory: Path) -> int:
    """The size with which TRL is fastest."""
    entries: Entries = {
        str(rows): (trl, trl_task(start, quickstart, rows, directory))
        for rows in TRL_MICRO_BATCH_ROWS
    }
    with contest(entries, directory) as contestants:
        take_turns(contestants, PROBE)
    return int(min(contestants.values(), key=lambda one: one.seconds).name)


@cache
def _started_math_reward() -> Any:
    from lit_grpo.rewards import MathReward

    reward = MathReward()
    reward.start()
    return reward


async def math_reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """The quickstart's reward for TRL."""
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
