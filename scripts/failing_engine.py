"""Trains with a server that is killed three times, beside a run that is left in peace, and compares
what became of them: `python scripts/failing_engine.py`, after `scripts/setup_vllm_cpu`.
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

import pandas as pd
import psutil
from _findings import Findings, exit_code_of, read_run

from lit_grpo.rollout.server import guard as server_guard

ROOT = Path(__file__).parent.parent
LIT_GRPO = [sys.executable, "-m", "lit_grpo"]
NUM_STEPS = 30
KILLS = {8: "main process", 15: "engine core", 22: "worker"}
"""Rows of metrics.csv -> what is killed when so many are there."""
TITLES = {"engine core": "VLLM::EngineCor", "worker": "VLLM::Worker"}
"""What vLLM calls its processes, as far as the kernel keeps it."""
TOLERANCE = 0.03
"""Of the accuracies: 1.5 standard deviations of a difference of two of 512 sums at 0.9."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a run left behind."""

    metrics: pd.DataFrame
    completions: pd.DataFrame
    exit_code: int
    killed: tuple[str, ...]

    @property
    def accuracy(self) -> float:
        """Of the final policy; NaN where it was not evaluated."""
        return self.metrics["val/accuracy"].iloc[-1]


def warm_up(run_dir: Path) -> Path:
    """The quickstart's warm-up; returns its final model."""
    command = [*LIT_GRPO, "sft", "--config", "quickstart_sft", "--run_dir", str(run_dir)]
    subprocess.run(command, cwd=ROOT, check=True)
    return run_dir / "final"


def train(
    run_dir: Path, policy: Path, num_steps: int, kills: dict[int, str], options: Sequence[str]
) -> Evidence:
    """The quickstart's GRPO with a vLLM server, whose processes are killed on the way."""
    command = [
        *LIT_GRPO, "fit", "--config", "quickstart", "--config", "engines/vllm_server_cpu",
        "--run_dir", str(run_dir), "--model.policy.path", str(policy),
        "--trainer.max_steps", str(num_steps), "--trainer.val_check_interval", str(num_steps),
        *options,
    ]  # fmt: skip
    trainer = subprocess.Popen(command, cwd=ROOT)
    try:
        killed = tuple(kill_on_the_way(trainer, run_dir / "metrics.csv", kills))
        exit_code = trainer.wait()
    finally:
        trainer.kill()
    return Evidence(**read_run(run_dir), exit_code=exit_code, killed=killed)


def kill_on_the_way(trainer: subprocess.Popen, metrics: Path, kills: dict[int, str]) -> list[str]:
    """What was killed, each as soon as the step after that row has begun."""
    killed = []
    for row, victim in sorted(kills.items()):
        while trainer.poll() is None and num_rows(metrics) < row:
            time.sleep(0.05)
        if trainer.poll() is None:
            time.sleep(0.5)  # into the next step's generation
            find(trainer.pid, victim).kill()
            killed.append(victim)
    return killed


def num_rows(metrics: Path) -> int:
    return len(metrics.read_text().splitlines()) - 1 if metrics.exists() else 0


def find(trainer: int, victim: str) -> psutil.Process:
    """One of the server's processes."""
    below = psutil.Process(trainer).children(recursive=True)
    guard = next(one for one in below if server_guard.__file__ in words(one))
    main, *others = guard.children(recursive=True)
    if victim == "main process":
        return main
    return next(one for one in others if TITLES[victim] in " ".join(words(one)))


def words(process: psutil.Process) -> list[str]:
    """Its name and command line; empty where it has ended."""
    with suppress(psutil.Error):
        return [process.name(), *process.cmdline()]
    return []


def findings(calm: Evidence, killed: Evidence, num_steps: int) -> Findings:
    """What must hold."""
    steps, restarts = len(killed.metrics), killed.metrics["rollout/restarts"].sum()
    failed = killed.metrics["rollout/failed_fraction"].max()
    proofs = killed.metrics["sampler/proof_difference"].notna().sum()
    largest = killed.metrics["sampler/logprob_difference_max"].max()
    columns = ["step", "prompt_id", "token_ids"]
    ours, theirs = (one.completions[columns].astype(str) for one in (calm, killed))
    same = (ours.to_numpy() == theirs.to_numpy()).all(1).mean() if len(ours) == len(theirs) else 0.0
    difference = abs(calm.accuracy - killed.accuracy)
    return {
        "both runs came to their end": (
            calm.exit_code == killed.exit_code == 0 and len(calm.metrics) == steps == num_steps,
            f"{len(calm.metrics)} and {steps} steps, exits {calm.exit_code} and {killed.exit_code}",
        ),
        "every kill was followed by one restart": (
            restarts == len(killed.killed) > 0,
            f"killed: {', '.join(killed.killed)}; {restarts:.0f} restarts",
        ),
        "no row was lost": (failed == 0, f"largest failed fraction {failed:g}"),
        "every restart was proven": (
            proofs >= 1 + len(killed.killed),
            f"{proofs} proofs, the first one included",
        ),
        "no completion is of other weights": (
            largest < 1e-3,
            f"largest difference of a logprob {largest:.1e}",
        ),
        "the accuracy is that of the run in peace": (
            difference <= TOLERANCE,
            f"{killed.accuracy:.3f} and {calm.accuracy:.3f}; {same:.1%} of completions are equal",
        ),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", type=Path, help="final model of a warm-up; made anew without")
    parser.add_argument("--dir", type=Path, help="where the runs are kept; nowhere without")
    parser.add_argument("options", nargs="*", help="further options of both runs, after --")
    arguments = parser.parse_args()
    with TemporaryDirectory() as temporary:
        directory = arguments.dir or Path(temporary)
        policy = (arguments.policy or warm_up(directory / "warm_up")).absolute()
        calm, killed = (
            train(directory / name, policy, NUM_STEPS, kills, arguments.options)
            for name, kills in (("in_peace", {}), ("killed", KILLS))
        )
    return exit_code_of(findings(calm, killed, NUM_STEPS))


if __name__ == "__main__":
    sys.exit(main())
