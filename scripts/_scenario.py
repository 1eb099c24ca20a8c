"""What a training run of ``scenarios.py`` is made of."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import yaml
from _checks import num_steps
from _tiny_model import SPREAD_LLAMA

ROOT = Path(__file__).parent.parent
VLLM = Path(os.environ.get("LIT_GRPO_VLLM_VENV", ROOT / ".venv-vllm"), "bin", "python")
SERVER = ROOT / "configs" / "engines" / "vllm_server_cpu.yaml"
NUM_STEPS = 8
SOME = -1
SMALL_DISK = (
    *("unshare", "--map-root-user", "--mount", "sh", "-c"),
    'mount -t tmpfs -o size=2m tmpfs run && "$@"; code=$?; cp -r run kept; exit $code',
    "sh",
)


class Process(Protocol):
    """What is used of a ``Popen``."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float) -> int: ...

    def send_signal(self, signum: signal.Signals) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Running:
    """A training run that is running."""

    process: Process
    run: Path

    def wait_for_rows(self, number: int) -> None:
        """Wait until so many rollout steps are logged, or the process has ended."""
        path = self.run / "metrics.csv"
        while self.process.poll() is None:
            if num_steps(path) >= number:
                return
            time.sleep(0.02)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A training run with something wrong, and how it must end."""

    title: str
    cause: str
    """Name in the table of causes."""
    event: str = ""
    """Kind of an event of the run that has this cause; empty if the run has none of it."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Dotted keys of the config that differ from the base."""
    says: str
    """Pattern of the first line that is not said of every run: it names the cause."""
    ends: str = ""
    """Pattern of a later line; a number in a group of it is that of the steps that are kept."""
    exit_code: int = 0
    keeps: int | None = NUM_STEPS
    """Finished rollout steps of the newest intact checkpoint; None if there is no checkpoint, and
    `SOME` if a clock decides. The completions of all these steps are kept, and ``final/`` is there
    if and only if the exit code is 0."""
    shows_traceback: bool = False
    """Whether the traceback of the user's code belongs to the message."""
    prepare: Callable[[Path], None] | None = None
    """Writes files into the working directory."""
    drive: Callable[[Running], None] | None = None
    """Does something to the training while it runs."""
    then: Callable[[Path], None] | None = None
    """Does something to the run directory when the training has ended; it is resumed then."""
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: Path | None = None
    """A file without which the scenario is left out."""
    command: tuple[str, ...] = ()
    """Goes before the command of the training."""
    judge: Mapping[str, Any] | None = None
    """Behaviour of a judge that scores the run."""


BASE: dict[str, Any] = {
    "trainer": {
        "accelerator": "cpu",
        "max_steps": NUM_STEPS,
        "callbacks": [
            {"class_path": "Checkpoints", "init_args": {"every_n_steps": 1}},
            {"class_path": "ZeroRewardBreaker", "init_args": {"alert_after": 2, "stop_after": 4}},
        ],
    },
    "model": {
        "policy": {"architecture": SPREAD_LLAMA},
        "rewards": [{"class_path": "_scenario_code.ShareOfDigits"}],
        "group_size": 4,
        "sampling": {"max_tokens": 6, "stop_token_ids": list(range(48))},
        "outage": {"first_pause_seconds": 0.2, "give_up_after_seconds": 2},
        "optimizer": {"class_path": "AdamW", "init_args": {"lr": 0.001}},
        "evaluation": {"before_training": False},
    },
    "data": {
        "class_path": "AdditionData",
        "init_args": {"num_digits": 1, "validation_size": 8, "prompts_per_step": 8},
    },
}


def reward(name: str, /, **arguments: Any) -> dict[str, Any]:
    return {"class_path": f"_scenario_code.{name}", "init_args": arguments}


def callback(name: str, /, **arguments: Any) -> dict[str, Any]:
    """Return the callbacks of the base, and one more, which acts before them."""
    own = {"class_path": f"_scenario_code.{name}", "init_args": arguments}
    return {"trainer.callbacks": [own, *BASE["trainer"]["callbacks"]]}


def send(signum: signal.Signals) -> Callable[[Running], None]:
    """Return what sends a signal in the fourth step or later."""

    def drive(running: Running) -> None:
        running.wait_for_rows(3)
        running.process.send_signal(signum)

    return drive


def flip_a_byte(run: Path) -> None:
    path = (run / "checkpoints" / "last.ckpt").resolve()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def write_null_answers(directory: Path) -> None:
    rows = ['{"prompt": "1+1=", "answer": "2"}', '{"prompt": "1+2=", "answer": null}'] * 8
    (directory / "rows.jsonl").write_text("\n".join(rows))


def with_wandb(name: str) -> dict[str, Any]:
    """Return a run that logs to wandb, whose service gets a signal."""
    settings = callback("SignalToWandb", name=name)
    teardown = {"class_path": "WandbTeardown", "init_args": {"timeout_seconds": 5}}
    settings["trainer.callbacks"].append(teardown)
    arguments = {"project": "scenarios", "offline": True, "save_dir": "."}
    return settings | {"trainer.logger": {"class_path": "WandbLogger", "init_args": arguments}}


def with_server(**supervision: Any) -> dict[str, Any]:
    """Return a run that samples with a vLLM server on the CPU."""
    engine = yaml.safe_load(SERVER.read_text())["model"]["engine"]
    engine["init_args"]["launch"]["python"] = str(VLLM)
    engine["init_args"]["supervision"] = supervision
    architecture = BASE["model"]["policy"]["architecture"]
    larger = architecture | {"hidden_size": 64, "max_position_embeddings": 64}  # heads of 32
    return {"model.engine": engine, "model.policy": {"architecture": larger}}


def watchdog(**arguments: Any) -> dict[str, Any]:
    """Return a watchdog that waits for seconds only."""
    times = {"min_seconds": 1.0, "first_seconds": 3.0}
    return {"class_path": "StallWatchdog", "init_args": times | arguments}


LONG = {"trainer.max_steps": 10_000, "model.optimizer.init_args.lr": 1e-6}
"""A clock or a signal ends it before the policy has changed."""
EVERY_STEP = {"class_path": "Checkpoints", "init_args": {"every_n_steps": 1, "keep_last": 99}}
