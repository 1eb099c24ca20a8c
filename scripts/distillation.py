"""Compare GRPO alone with on-policy distillation on the built-in task, from one small student.

    python scripts/distillation.py --teacher runs/quickstart/0/final --work_dir runs/distillation

What is compared is the held-out accuracy by optimizer step, which does not depend on the machine.
A run that is complete is not repeated. The script prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from pathlib import Path
from statistics import median

STUDENT = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3}
WARM_UP = """
trainer:
  max_steps: 4000
  callbacks:
    - class_path: EarlyStopping
      init_args: {monitor: val/accuracy, mode: max, stopping_threshold: 0.5, patience: 100000}
"""
EVERY = 10
"""Optimizer steps from one evaluation to the next."""


def methods(teacher: str) -> dict[str, list[str]]:
    """Return the arguments of each method."""
    preset = ["--config", "presets/on_policy_distillation", "--model.teacher.path", teacher]
    top_k = ["--model.objective.distillation.top_k", "8"]
    fast = ["--model.optimizer.lr", "0.0015"]
    return {
        "GRPO": [],
        "GRPO, lr 0.0015": fast,
        "distillation, lr 0.0015": [*preset, *fast],
        "distillation, top_k 8, lr 0.0015": [*preset, *top_k, *fast],
    }


def lit_grpo(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "lit_grpo", *words], check=True, stdout=sys.stderr)


def warm_up(work_dir: Path) -> Path:
    """Return the student that all runs start from."""
    run_dir, config = work_dir / "student", work_dir / "warm_up.yaml"
    if not (run_dir / "final").exists():
        config.write_text(WARM_UP)
        files = ["--config", "quickstart_sft", "--config", str(config)]
        sizes = [f"--model.policy.architecture.{key}={value}" for key, value in STUDENT.items()]
        lit_grpo("sft", *files, *sizes, "--run_dir", str(run_dir))
    return run_dir / "final"


def train(run_dir: Path, words: list[str], student: Path, seed: int, max_steps: int) -> None:
    settings = {
        "model.policy.path": student,
        "seed_everything": seed,
        "trainer.max_steps": max_steps,
        "trainer.val_check_interval": EVERY,
        "data.init_args.prompts_per_step": 128,
        "run_dir": run_dir,
    }
    given = [f"--{key}={value}" for key, value in settings.items()]
    lit_grpo("fit", "--config", "quickstart", *words, *given)


def accuracies(run_dir: Path) -> list[float]:
    """Return the held-out accuracy before training and at each evaluation."""
    with (run_dir / "metrics.csv").open() as file:
        return [float(row["val/accuracy"]) for row in csv.DictReader(file) if row["val/accuracy"]]


def steps_to(goal: float, by_evaluation: list[float]) -> float:
    """Return the steps after which the accuracy first is as high, infinity if it never is."""
    reached = [number for number, value in enumerate(by_evaluation) if value >= goal]
    return EVERY * reached[0] if reached else float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--work_dir", type=Path, default=Path("runs/distillation"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", help="methods to run, by their names in the table")
    parser.add_argument("--goals", type=float, nargs="+", default=[0.8, 0.9])
    parser.add_argument("--max_steps", type=int, default=120)
    options = parser.parse_args()
    options.work_dir.mkdir(parents=True, exist_ok=True)
    student = warm_up(options.work_dir)
    goals = "".join(f" steps to {goal} |" for goal in options.goals)
    print(f"| method | accuracy after {options.max_steps} steps |{goals}")
    print("|---|---|" + "---|" * len(options.goals))
    for name, words in methods(options.teacher).items():
        if options.only and name not in options.only:
            continue
        runs = []
        for seed in options.seeds:
            run_dir = options.work_dir / f"{name.replace(' ', '_').replace(',', '')}_{seed}"
            if not (run_dir / "final").exists():
                train(run_dir, words, student, seed, options.max_steps)
            runs.append(accuracies(run_dir))
        ends = ", ".join(f"{run[-1]:.3f}" for run in runs)
        steps = [median(steps_to(goal, run) for run in runs) for goal in options.goals]
        shown = "".join(" not reached |" if s == float("inf") else f" {s:.0f} |" for s in steps)
        print(f"| {name} | {ends} |{shown}", flush=True)


if __name__ == "__main__":
    main()
