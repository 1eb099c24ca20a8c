"""Measure how soon a run ends at SIGTERM, apart from its save: while it samples, scores, or waits.

The runs are real, with all their processes; the server does not answer any more.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
from _benchmark.results import Result
from _tiny_model import TINY_LLAMA
from killed_run import kill, stage_of

SCRIPTS = Path(__file__).parents[1]
SUPPORT = SCRIPTS.parent / "tests" / "support"
SAVE_FILE = "save_seconds"
STOP_SECONDS = 10.0
"""Within this time a run must have ended, apart from its save."""
MAX_SECONDS = 300
STEADY_SECONDS = 2.0
"""Time in a stage before the signal."""
TINY = TINY_LLAMA | {"max_position_embeddings": 4096}
SMALL = TINY | {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
NEVER = {"class_path": "holds.HeldReward", "init_args": {"call": 0}}
SERVER = {
    "class_path": "SGLangEngine",
    "init_args": {
        "launch": {
            "program": [sys.executable, str(SUPPORT / "sglang_server.py")],
            "env": {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        },
        "supervision": {"health_timeout": 600, "weight_sync_timeout": 600},
    },
}
SHORT = {"max_tokens": 8}
SILENCE = {"class_path": "holds.SilenceServers", "init_args": {"step": 1}}
"""In the first step the server is still starting."""
SILENT_FILE = "held0"
"""``SilenceServers`` writes it."""

Settings = dict[str, Any]
PLACES: dict[str, tuple[str, Settings, list[Settings]]] = {
    "it samples": ("generation", {"policy": {"architecture": SMALL}}, []),
    "it waits for a reward": ("reward", {"sampling": SHORT, "rewards": [NEVER]}, []),
    "it waits for a server": ("weight_sync", {"sampling": SHORT, "engine": SERVER}, [SILENCE]),
}
"""When the signal comes -> the stage, settings of the model, and callbacks for it."""


class SaveSeconds(L.Callback):
    """Write into a file how long the longest save of the run took."""

    def teardown(self, trainer: L.Trainer, module: Any, stage: str) -> None:
        from lit_grpo.callbacks import Checkpoints

        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        (saving,) = (one for one in callbacks if isinstance(one, Checkpoints))
        if trainer.is_global_zero:
            Path(SAVE_FILE).write_text(str(saving.longest_save))


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """How a run ended."""

    exit_code: int
    seconds: float
    """From the signal to the exit."""
    save_seconds: float


def compare_stopping(rounds: int) -> Iterator[Result]:
    """Compare the seconds to the exit, without the save, with the limit."""
    for num_processes in (1, 2):
        for place in PLACES:
            stops = [stop(place, num_processes) for _ in range(rounds)]
            wrong = [one.exit_code for one in stops if one.exit_code != 128 + signal.SIGTERM]
            if wrong:
                raise RuntimeError(f"a run that was to stop while {place} ended with {wrong[0]}")
            seconds = [one.seconds - one.save_seconds for one in stops]
            processes = "1 process" if num_processes == 1 else f"{num_processes} processes"
            yield Result(
                figure="stopping",
                case=f"while {place}, {processes}",
                against="the time within which a run must end at SIGTERM, apart from its save",
                ours=median(seconds),
                other=STOP_SECONDS,
                unit="s",
                target=1.0,
                details={
                    "": {
                        "slowest (s)": max(seconds),
                        "save (s)": median(one.save_seconds for one in stops),
                    }
                },
            )


def stop(place: str, num_processes: int) -> Stopped:
    """Start a run, send its first process SIGTERM in a stage, and wait for its exit.

    Raises:
        RuntimeError: it has ended before the signal, or without the teardown of its callbacks.
    """
    stage, model, callbacks = PLACES[place]
    with TemporaryDirectory() as directory:
        process = _start(Path(directory), model, callbacks, num_processes)
        try:
            _wait_for(stage, process, Path(directory))
            begin = time.monotonic()
            process.send_signal(signal.SIGTERM)
            exit_code = process.wait(MAX_SECONDS)
            seconds = time.monotonic() - begin
        finally:
            kill(process)
        saved = Path(directory, SAVE_FILE)
        if not saved.exists():
            said = Path(directory, "said.txt").read_text()
            raise RuntimeError(f"the run ended with exit code {exit_code} and no teardown:\n{said}")
        save_seconds = float(saved.read_text())
    return Stopped(exit_code=exit_code, seconds=seconds, save_seconds=save_seconds)


def _start(
    directory: Path, model: Settings, callbacks: list[Settings], num_processes: int
) -> subprocess.Popen[bytes]:
    config = {
        "trainer": {
            "accelerator": "cpu",
            "devices": num_processes,
            "strategy": "auto" if num_processes == 1 else "ddp",
            "max_steps": 10,
            "enable_progress_bar": False,
            "callbacks": [
                {"class_path": "killed_run.StageFile"},
                {"class_path": "_benchmark.stopping.SaveSeconds"},
                *callbacks,
            ],
        },
        "model": {
            "policy": {"architecture": TINY},
            "group_size": 8,
            "sampling": {"max_tokens": 2000, "min_tokens": 2000},
            "rewards": ["MathReward"],
            "evaluation": {"before_training": False},
        }
        | model,
        "data": {
            "class_path": "AdditionData",
            "init_args": {"train_size": 64, "validation_size": 0, "prompts_per_step": 8},
        },
    }
    (directory / "run.json").write_text(json.dumps(config))
    path = os.pathsep.join([str(SCRIPTS), str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    words = ["fit", "--config", "run.json", "--run_dir", "run"]
    with (directory / "said.txt").open("wb") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "lit_grpo", *words],
            cwd=directory,
            stdout=said,
            stderr=said,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )


def _wait_for(stage: str, process: subprocess.Popen[bytes], directory: Path) -> None:
    """Wait until a run has been in a stage for a while.

    Raises:
        RuntimeError: it has ended before; the message is what it said.
        TimeoutError: it does not get there.
    """
    deadline = time.monotonic() + MAX_SECONDS
    since: float | None = None
    while since is None or time.monotonic() - since < STEADY_SECONDS:
        if process.poll() is not None:
            raise RuntimeError((directory / "said.txt").read_text())
        if time.monotonic() > deadline:
            raise TimeoutError(f"the run has not come to the stage {stage}")
        is_silent = stage != "weight_sync" or (directory / SILENT_FILE).exists()
        is_there = stage_of(directory) == stage and is_silent
        since = (since or time.monotonic()) if is_there else None
        time.sleep(0.02)
