"""Train with an inference server that is killed three times, and without kills, and compare the
two runs: `python scripts/failing_engine.py`, after `scripts/setup_vllm_cpu`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd
import psutil
from _checks import Checks, num_steps, print_checks, read_run
from _warm_up import warm_up

from lit_grpo.rollout.server import guard as server_guard

ROOT = Path(__file__).parent.parent
MIN_STEPS = 5
"""With fewer, two kills would be at the same step."""
TITLES = {"engine core": "VLLM::EngineCor", "worker": "VLLM::Worker"}
"""vLLM's titles of its processes, as far as the kernel keeps them."""
TOLERANCE = 0.03
"""Largest difference of the accuracies: 1.5 standard deviations of the difference between two
accuracies of 0.9 on 512 sums."""


@dataclass(frozen=True, kw_only=True)
class RunOutput:
    """What a run has left behind."""

    metrics: pd.DataFrame
    completions: pd.DataFrame
    exit_code: int
    killed: tuple[str, ...]

    @property
    def accuracy(self) -> float:
        """Accuracy of the final policy; NaN if it was not evaluated."""
        return float(self.metrics["val/accuracy"].iloc[-1])


def planned_kills(num_steps: int) -> dict[int, str]:
    """Return the number of rows in metrics.csv at which a process is killed -> which one."""
    rows = (num_steps * 4 // 15, num_steps // 2, num_steps * 11 // 15)
    return dict(zip(rows, ("main process", "engine core", "worker"), strict=True))


def train(
    run_dir: Path, policy: Path, num_steps: int, kills: dict[int, str], options: Sequence[str]
) -> RunOutput:
    """Run the quickstart's GRPO with a vLLM server and kill the server's processes meanwhile."""
    command = [
        sys.executable, "-m", "lit_grpo", "fit",
        "--config", "quickstart", "--config", "engines/vllm_server_cpu",
        "--run_dir", str(run_dir), "--model.policy.path", str(policy),
        "--trainer.max_steps", str(num_steps), "--trainer.val_check_interval", str(num_steps),
        *options,
    ]  # fmt: skip
    trainer = subprocess.Popen(command, cwd=ROOT)
    try:
        killed = tuple(kill_at_rows(trainer, run_dir / "metrics.csv", kills))
        exit_code = trainer.wait()
    finally:
        trainer.kill()
    return RunOutput(**read_run(run_dir), exit_code=exit_code, killed=killed)


def kill_at_rows(
    trainer: subprocess.Popen[bytes], metrics: Path, kills: dict[int, str]
) -> list[str]:
    """Kill each process once the step after its row has begun; return what was killed."""
    killed = []
    for row, victim in sorted(kills.items()):
        while trainer.poll() is None and num_steps(metrics) < row:
            time.sleep(0.05)
        if trainer.poll() is None:
            time.sleep(0.5)  # into the next step's generation
            find_process(trainer.pid, victim).kill()
            killed.append(victim)
    return killed


def find_process(trainer: int, victim: str) -> psutil.Process:
    """Return one of the processes of the trainer's server."""
    descendants = psutil.Process(trainer).children(recursive=True)
    guard = next(process for process in descendants if server_guard.__file__ in words(process))
    main, *others = guard.children(recursive=True)
    if victim == "main process":
        return main
    return next(process for process in others if TITLES[victim] in " ".join(words(process)))


def words(process: psutil.Process) -> list[str]:
    """Return a process's name and command line; empty if it has ended."""
    with suppress(psutil.Error):
        return [process.name(), *process.cmdline()]
    return []


def compare_runs(undisturbed: RunOutput, killed: RunOutput, num_steps: int) -> Checks:
    """Return all statements about the two runs, each with whether it holds."""
    steps, other_steps = len(undisturbed.metrics), len(killed.metrics)
    restarts = killed.metrics["rollout/restarts"].sum()
    failed = killed.metrics["rollout/failed_fraction"].max()
    checks = killed.metrics["sampler/weight_check_difference"].notna().sum()
    largest = killed.metrics["sampler/logprob_difference_max"].max()
    columns = ["step", "prompt_id", "token_ids"]
    ours, theirs = (run.completions[columns].astype(str) for run in (undisturbed, killed))
    equal = _share_equal(ours.to_numpy(), theirs.to_numpy())
    difference = abs(undisturbed.accuracy - killed.accuracy)
    return {
        "both runs made all their steps": (
            undisturbed.exit_code == killed.exit_code == 0 and steps == other_steps == num_steps,
            f"{steps} and {other_steps} steps, exit codes {undisturbed.exit_code} and "
            f"{killed.exit_code}",
        ),
        "every kill was followed by one restart": (
            restarts == len(killed.killed) > 0,
            f"killed: {', '.join(killed.killed)}; {restarts:.0f} restarts",
        ),
        "no row was lost": (failed == 0, f"largest failed fraction {failed:g}"),
        "the weights were checked after every restart": (
            checks >= 1 + len(killed.killed),
            f"{checks} weight checks, the first one included",
        ),
        "no completion was sampled from other weights": (
            largest < 1e-3,
            f"largest difference of a logprob {largest:.1e}",
        ),
        "the accuracy is that of the undisturbed run": (
            difference <= TOLERANCE,
            f"{killed.accuracy:.3f} and {undisturbed.accuracy:.3f}; {equal:.1%} of completions are "
            "equal",
        ),
    }


def _share_equal(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the share of equal rows; 0 for another number of rows."""
    return (ours == theirs).all(1).mean() if len(ours) == len(theirs) else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30, help="steps of each run (default: 30)")
    parser.add_argument("--policy", type=Path, help="final model of a warm-up (default: run one)")
    parser.add_argument("--dir", type=Path, help="keep the runs there (default: delete them)")
    parser.add_argument("options", nargs="*", help="options of both runs, after --")
    arguments = parser.parse_args()
    if arguments.steps < MIN_STEPS:
        parser.error(f"--steps must be >= {MIN_STEPS}, got {arguments.steps}")
    kills = planned_kills(arguments.steps)
    with TemporaryDirectory() as temporary:
        directory = (arguments.dir or Path(temporary)).absolute()
        policy = (arguments.policy or warm_up(directory / "warm_up")).absolute()
        undisturbed, killed = (
            train(directory / name, policy, arguments.steps, victims, arguments.options)
            for name, victims in (("undisturbed", {}), ("killed", kills))
        )
    return print_checks(compare_runs(undisturbed, killed, arguments.steps))


if __name__ == "__main__":
    sys.exit(main())
