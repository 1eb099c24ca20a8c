"""Run the stages of ``scripts/rubric_recipe``, each unless it has been done.

What a stage has made says whether it is done: a prepared directory is whole or not there, a cache
of votes continues where it ended, and a run resumes. There is no other bookkeeping.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from _toy_judge import toy_judge
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

LIT_GRPO = [sys.executable, "-m", "lit_grpo"]
ROOT = Path(__file__).parent.parent
DIRECTORY = ROOT / "runs" / "rubric_recipe"
RESULTS = Path("accuracies.json")
RUBRICS = ("count the digits", "the longer the better", "the shorter the better")
"""What the warm-up teaches. By the first, stored answers are ordered as by their gold scores."""
POLICY = {
    "architecture": {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
        "initializer_range": 0.08,
    }
}
RECIPE = {
    "description": "digits that a program checks, and questions whose answers a judge has scored",
    "holdout_size": 24,
    "validation_size": 8,
    "judge": {"model": "toy", "temperature": None},
    "gold": {"num_evals": 2},
    "curriculum": "0.8:0.2:0.4 0.5:0.5:0.3 0.2:0.8:0.3:0.5",
    "sources": {
        "verifiable": {
            "kind": "verifiable",
            "data": "tasks.jsonl",
            "columns": {"completion": "completion"},
        },
        "open": {
            "kind": "open",
            "data": "questions.jsonl",
            "columns": {"completion": "completion"},
        },
    },
}
SAMPLING = {"max_tokens": 24}
ADAMW = {"class_path": "AdamW", "init_args": {"lr": 1e-3, "weight_decay": 0.0}}
WARM_UP: dict[str, Any] = {
    "trainer": {
        "accelerator": "cpu",
        "max_steps": 40,
        "limit_val_batches": 0,
        "callbacks": [{"class_path": "Checkpoints", "init_args": {"every_n_steps": 10}}],
    },
    "model": {"policy": POLICY, "sampling": SAMPLING, "optimizer": ADAMW},
}
ALIGNMENT = {"judge": {"model": "toy"}, "only_sources": ["open"]}
EXACT = {"lambda_len": 0.0, "lambda_info": 0.0, "lambda_defense": 0.0}
DIGITS = {"class_path": "MathReward", "init_args": {"only_sources": ["verifiable"]}}
ORDER = {"class_path": "RubricAlignmentReward", "init_args": ALIGNMENT | EXACT}
"""The rank correlation of the gold scores with those that the judge gives by the rubric."""
GRPO: dict[str, Any] = {
    "trainer": {
        "accelerator": "cpu",
        "limit_val_batches": 0,
        "callbacks": [{"class_path": "Checkpoints", "init_args": {"every_n_steps": 5}}],
    },
    "model": {
        "policy": {"path": "warm_up/final"},
        "group_size": 8,
        "sampling": SAMPLING,
        "rewards": [DIGITS, {"class_path": "RubricAlignmentReward", "init_args": ALIGNMENT}],
        "optimizer": {"class_path": "AdamW", "init_args": {"lr": 5e-4, "weight_decay": 0.0}},
        "evaluation": {"accuracy": [DIGITS, ORDER], "before_training": False},
    },
}
TEMPLATE = "--data.sources.open.data.init_args.template={{ prompt }}"
"""The prompts are those of the warm-up; by default, the policy is asked at greater length."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/rubric_recipe")
    parser.add_argument("directory", nargs="?", type=Path, default=DIRECTORY)
    parser.add_argument("--steps", type=int, default=60, help="rollout steps of GRPO")
    options = parser.parse_args()
    write_inputs(options.directory, options.steps)
    os.chdir(options.directory)
    with toy_judge() as judge:
        os.environ |= {"OPENAI_BASE_URL": f"{judge.url}/v1", "OPENAI_API_KEY": "none"}
        make_data()
        train()
        measure()
    run("report", "warm_up", "grpo")
    print_accuracies()


def write_inputs(directory: Path, num_steps: int) -> None:
    """Write the raw files, the recipe and the configs of the two training runs, always the same."""
    directory.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    tasks = [_task(number) for number in draw.sample(range(100, 1000), 100)]
    questions = [_question(number, draw) for number in range(80)]
    for name, rows in {"tasks": tasks, "questions": questions}.items():
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        (directory / f"{name}.jsonl").write_text(lines)
    grpo = GRPO | {"trainer": GRPO["trainer"] | {"max_steps": num_steps}}
    for name, values in {"recipe": RECIPE, "warm_up": WARM_UP, "grpo": grpo}.items():
        (directory / f"{name}.yaml").write_text(yaml.safe_dump(values, sort_keys=False))


def _task(number: int) -> dict[str, Any]:
    """Return a task that a program checks."""
    last = str(number % 10)
    return {"prompt": f"The last digit of {number} is ", "answer": last, "completion": last}


def _question(number: int, draw: random.Random) -> dict[str, Any]:
    """Return a question with answers of which those with more digits are better."""
    room, floor, lift = 100 + number, draw.randint(1, 9), draw.randint(1, 9)
    question = f"Where is room {room}?"
    return {
        "prompt": f"{question} Rubric: ",
        "question": question,
        "answers": [
            "Ask at the entrance, somebody will gladly show you the way.",
            f"Take lift {lift}.",
            f"Lift {lift}, floor {floor}, room {room}.",
            f"{lift} {floor} {room}",
        ],
        "completion": draw.choice(RUBRICS),
    }


def make_data() -> None:
    """Prepare the data of both trainings, with gold scores for the second."""
    if not Path("warm_up_data").exists():
        run("prepare", "--preset", "recipe.yaml", "--out", "warm_up_data", "--sft")
    if not Path("prepared").exists():
        run("precompute", "--preset", "recipe.yaml")
        run("prepare", "--preset", "recipe.yaml", "--out", "prepared", "--only_cached")
        run("analyze", "prepared", "--min_signal", "90")


def train() -> None:
    """Warm up, then train on the rewards."""
    if not Path("warm_up", "final").exists():
        run("sft", *configs("warm_up", "warm_up_data", 32), *into("warm_up"))
    if not Path("grpo", "final").exists():
        run("fit", *configs("grpo", "prepared", 16), TEMPLATE, *into("grpo"))


def configs(name: str, data: str, prompts_per_step: int) -> list[str]:
    of_data = ["--config", f"{data}/data.yaml", f"--data.prompts_per_step={prompts_per_step}"]
    return ["--config", f"{name}.yaml", *of_data]


def into(run_dir: str) -> list[str]:
    """Return the options of a run that resumes where there is something to resume from."""
    return ["--run_dir", run_dir, "--ckpt_path", "auto"]


def measure() -> None:
    """Measure both policies on the held-out prompts, which ``lit-grpo test`` reads."""
    if RESULTS.exists():
        return
    found = {}
    for policy in ("warm_up", "grpo"):
        of_policy = [f"--model.policy.path={policy}/final", TEMPLATE]
        said = run("test", *configs("grpo", "prepared", 16), *of_policy, quiet=True)
        found[policy] = dict(re.findall(r"test/(\w+)/accuracy\s+([\d.]+)", said))
    partial = RESULTS.with_suffix(".partial")
    partial.write_text(json.dumps(found))
    partial.replace(RESULTS)


def print_accuracies() -> None:
    found = json.loads(RESULTS.read_text())
    table = Table("on held-out prompts", "after the warm-up", "after GRPO", box=SIMPLE)
    for source, what in (("verifiable", "right digits"), ("open", "rank correlation")):
        table.add_row(what, *(found[policy][source] for policy in ("warm_up", "grpo")))
    Console().print(table)


def run(*words: str, quiet: bool = False) -> str:
    """Run a command of lit-grpo; return what it has printed if it is quiet."""
    print(f"\n$ lit-grpo {shlex.join(words)}", flush=True)
    output = subprocess.PIPE if quiet else None
    done = subprocess.run([*LIT_GRPO, *words], stdout=output, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout or ""


if __name__ == "__main__":
    main()
