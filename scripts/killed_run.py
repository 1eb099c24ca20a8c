"""Kill a run at many random moments, resume it each time, and compare the end with that of an
undisturbed one: `python scripts/killed_run.py`. Then kill it in the stages that no moment has hit.
With `--signal TERM INT` the run is asked to end, which its exit code must show.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import pandas as pd
import yaml
from _checks import Checks, print_checks, read_run
from rich.console import Console
from rich.progress import track

STAGE_FILE = "stage"
TIMELESS = ("reward/", "policy/", "completions/", "val/", "advantage/")
"""Prefixes of the metrics that do not measure time."""
ROWS = ["step", "prompt_id", "token_ids", "reward", "advantage"]
MAX_SECONDS = 300
STAGES = ("generation", "reward", "micro_batch", "optimizer step", "checkpoint")
"""In each of these the run must have been killed: sampling, scoring, backward, update, saving."""
MAX_AIMED = 2 * len(STAGES)
MAX_PAUSE = 2.5
"""Longest time from the first step to a kill, in steps, so that the kills spread over the run."""
SIGNALS = {name: getattr(signal, f"SIG{name}") for name in ("KILL", "TERM", "INT")}
CONSOLE = Console(stderr=True)
CONFIG: dict[str, Any] = {
    "trainer": {
        "accelerator": "cpu",
        "check_val_every_n_epoch": None,
        "val_check_interval": 3,
        "callbacks": [
            {"class_path": "Checkpoints", "init_args": {"every_n_steps": 1, "keep_last": 3}},
            {"class_path": "killed_run.StageFile"},
        ],
    },
    "model": {
        "policy": {
            "architecture": {
                "model_type": "llama",
                "hidden_size": 128,
                "intermediate_size": 256,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "initializer_range": 0.1,
            }
        },
        "group_size": 4,
        "sampling": {"max_tokens": 8},
        "rewards": [
            {"class_path": "FormatReward", "init_args": {"pattern": "[0-9 -~]*", "mode": "full"}},
            {"class_path": "LengthReward", "init_args": {"start_tokens": 1, "end_tokens": 8}},
        ],
        "objective": {"kl": {"coef": 0.01}},
        "update": {"epochs": 2, "minibatches": 2},
        "optimizer": {"class_path": "AdamW", "init_args": {"lr": 0.003}},
        "lr_schedule": "cosine",
    },
    "data": {
        "class_path": "AdditionData",
        "init_args": {
            "num_digits": 1,
            "train_size": 80,
            "validation_size": 8,
            "prompts_per_step": 8,
        },
    },
}


class StageFile(L.Callback):
    """Keep what the run is doing in a file, for the process that kills it."""

    def setup(self, trainer: L.Trainer, module: Any, stage: str) -> None:
        self._file = os.open(STAGE_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def _write(self, stage: str) -> None:
        os.pwrite(self._file, f"{stage:<20}".encode(), 0)

    def on_train_start(self, *args: Any) -> None:
        self._write("between stages")

    def on_train_batch_start(self, *args: Any) -> None:
        self._write("between stages")

    def on_validation_end(self, *args: Any) -> None:
        self._write("between stages")

    def on_stage_start(self, trainer: L.Trainer, module: Any, name: str) -> None:
        self._write(name)

    def on_stage_end(self, trainer: L.Trainer, module: Any, stage: Any) -> None:
        self._write("between stages")

    def on_before_optimizer_step(self, *args: Any) -> None:
        self._write("optimizer step")

    def on_save_checkpoint(self, *args: Any) -> None:
        self._write("checkpoint")

    def on_validation_start(self, *args: Any) -> None:
        self._write("validation")


def command_in(directory: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts the run in this directory or resumes it, with its variables.

    The run has not begun to train then.
    """
    words = ["fit", "--config", "../run.yaml", "--run_dir", "run", "--ckpt_path", "auto"]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    (directory / STAGE_FILE).unlink(missing_ok=True)
    variables = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return [sys.executable, "-m", "lit_grpo", *words], variables


def start(directory: Path) -> subprocess.Popen[bytes]:
    """Start the run in this directory, or resume it: the same command does both."""
    command, variables = command_in(directory)
    with (directory / "said.txt").open("ab") as said:
        return subprocess.Popen(
            command,
            cwd=directory,
            stdout=said,
            stderr=said,
            env=variables,
            start_new_session=True,
        )


def stage_of(directory: Path) -> str:
    """Return what the run is doing, empty before it trains."""
    with suppress(FileNotFoundError):
        return (directory / STAGE_FILE).read_text().strip()
    return ""


def run_to_its_end(directory: Path) -> int:
    process = start(directory)
    try:
        return process.wait(MAX_SECONDS)
    finally:
        kill(process)


@dataclass(frozen=True, kw_only=True)
class Kill:
    """How a start of the run ended."""

    signum: int
    stage: str
    """What it was doing when the signal came."""
    exit_code: int
    seconds: float
    """From the signal to the exit."""

    @property
    def is_right(self) -> bool:
        """Whether the exit code says what has ended it."""
        is_kill = self.signum == signal.SIGKILL
        return self.exit_code == (-self.signum if is_kill else 128 + self.signum)


def kill_once(directory: Path, seconds: float, signum: int, aim: str = "") -> Kill | None:
    """Start or resume the run, send it a signal some seconds after it has begun to train.

    Args:
        aim: A stage that is waited for, then.

    Returns:
        None if it had ended by itself.
    """
    process = start(directory)
    try:
        deadline = time.monotonic() + MAX_SECONDS
        while process.poll() is None and not stage_of(directory):
            if time.monotonic() > deadline:
                raise TimeoutError("the run has not begun to train; see said.txt")
            time.sleep(0.005)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        while aim and process.poll() is None and stage_of(directory) != aim:
            time.sleep(0.0002)
        if process.poll() is not None:
            return None
        stage, begin = stage_of(directory), time.monotonic()
        os.killpg(process.pid, signum)
        exit_code = process.wait(MAX_SECONDS)
        if signum == signal.SIGKILL:
            stage = stage_of(directory)  # exactly, since nothing is done after it
        seconds = time.monotonic() - begin
        return Kill(signum=signum, stage=stage, exit_code=exit_code, seconds=seconds)
    finally:
        kill(process)


def kill_often(
    directory: Path, pauses: Sequence[float], signums: Sequence[int], num_random: int
) -> list[Kill]:
    """Kill the run once after each of these pauses, with the signal of that pause.

    The kills after the random ones wait for stages that were not hit, while there are any.
    """
    kills: list[Kill] = []
    moments = enumerate(zip(pauses, signums, strict=True))
    for number, (seconds, signum) in track(moments, "killing", len(pauses), console=CONSOLE):
        missed = missed_stages(kills)
        if number >= num_random and not missed:
            break
        aim = missed[0] if number >= num_random else ""
        if end := kill_once(directory, seconds, signum, aim):
            kills.append(end)
    return kills


def missed_stages(kills: Sequence[Kill]) -> list[str]:
    hit = {one.stage for one in kills}
    return [stage for stage in STAGES if stage not in hit]


def kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def digest(directory: Path) -> str:
    """Return the hash of the final model."""
    path = directory / "run" / "final" / "model.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "none"


def compare(whole: Path, killed: Path, kills: Sequence[Kill], num_kills: int) -> Checks:
    """Return all statements about the two runs, each with whether it holds."""
    ours, theirs = (read_run(directory / "run") for directory in (whole, killed))
    names = ["step", *(name for name in map(str, ours["metrics"]) if name.startswith(TIMELESS))]
    hashes = [digest(directory)[:12] for directory in (whole, killed)]
    num_rows = [len(one["metrics"]) for one in (ours, theirs)]
    rows = [one["completions"][ROWS].astype(str) for one in (ours, theirs)]
    return how_it_was_killed(kills, num_kills, (killed / "said.txt").read_text()) | {
        "its final model is the undisturbed one, bit for bit": (
            hashes[0] == hashes[1] != "none",
            f"SHA-256 {hashes[0]}… and {hashes[1]}…",
        ),
        "its metrics are the same, with one row per step": (
            _is_equal(*(one["metrics"].reindex(columns=names) for one in (ours, theirs))),
            f"{num_rows[0]} and {num_rows[1]} rows, {len(names)} columns that do not measure time",
        ),
        "its completions are the same": (
            _is_equal(*rows),
            f"{len(rows[0])} and {len(rows[1])} completions",
        ),
    }


def how_it_was_killed(kills: Sequence[Kill], num_kills: int, said: str) -> Checks:
    """Return the statements about the kills and the starts, by what all of them have said."""
    stages = Counter(one.stage for one in kills)
    missed = missed_stages(kills)
    wrong = sorted({one.exit_code for one in kills if not one.is_right})
    codes = wrong or sorted({one.exit_code for one in kills})
    longest = max((one.seconds for one in kills), default=0.0)
    resumes, starts = said.count("resuming from "), said.count("run directory: ")
    return {
        "the run was killed as often as asked": (
            len(kills) >= num_kills,
            ", ".join(f"{stage} {count}" for stage, count in stages.most_common()),
        ),
        "it was killed in every stage": (
            not missed,
            f"not in {', '.join(missed)}" if missed else ", ".join(STAGES),
        ),
        "it ended with the exit code of the signal": (
            not wrong,
            f"{', '.join(map(str, codes))}, at most {longest:.1f} s after it",
        ),
        "it was resumed": (
            resumes > 0,
            f"{resumes} of its {starts} starts went on from a checkpoint",
        ),
    }


def _is_equal(ours: pd.DataFrame, theirs: pd.DataFrame) -> bool:
    return ours.reset_index(drop=True).equals(theirs.reset_index(drop=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30, help="number of kills (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments (default: 0)")
    parser.add_argument(
        "--signal", nargs="+", choices=SIGNALS, default=["KILL"], help="drawn from (default: KILL)"
    )
    parser.add_argument("--dir", type=Path, help="keep the runs there (default: delete them)")
    arguments = parser.parse_args()
    moments = random.Random(arguments.seed)
    with TemporaryDirectory() as temporary:
        directory = (arguments.dir or Path(temporary)).absolute()
        whole, killed = directory / "whole", directory / "killed"
        for one in (whole, killed):
            one.mkdir(parents=True)
        num_steps = 6 + 3 * (arguments.kills + MAX_AIMED)
        trainer = CONFIG["trainer"] | {"max_steps": 4 * num_steps}  # four updates each
        (directory / "run.yaml").write_text(yaml.safe_dump(CONFIG | {"trainer": trainer}))
        begin = time.monotonic()
        if run_to_its_end(whole):
            print((whole / "said.txt").read_text(), file=sys.stderr)
            return 1
        training = pd.read_csv(whole / "run" / "metrics.csv")["seconds"]
        mean_step = (training.iloc[-1] - training.iloc[0]) / (len(training) - 1)
        seconds = time.monotonic() - begin
        print(f"undisturbed: {num_steps} steps of {mean_step:.2f} s ({seconds:.0f} s)")
        num_pauses = arguments.kills + MAX_AIMED
        pauses = [moments.uniform(0, MAX_PAUSE * mean_step) for _ in range(num_pauses)]
        signums = [SIGNALS[name] for name in moments.choices(arguments.signal, k=num_pauses)]
        kills = kill_often(killed, pauses, signums, arguments.kills)
        run_to_its_end(killed)
        return print_checks(compare(whole, killed, kills, arguments.kills))


if __name__ == "__main__":
    sys.exit(main())
