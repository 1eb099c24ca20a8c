"""Run `lit-grpo` in a process of its own, with each of the engines."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from subprocess import Popen
from typing import Any

import _checks
import processes
import sglang_server
from built_once import built_once
from vllm_environment import PYTHON
from vllm_settings import ENV

SETTINGS: dict[str, dict[str, Any]] = {
    "HFEngine": {},
    "VLLMServerEngine": {"config": "engines/vllm_server_cpu", "launch.python": str(PYTHON)},
    "VLLMEngine": {"config": "engines/vllm_cpu", "weight_check.every": 2},
    "SGLangEngine": {
        "config": "engines/sglang",
        "launch.dtype": "float32",
        "launch.program": [sys.executable, sglang_server.__file__],
    },
}
"""What a config needs to sample with an engine on a CPU: a further config, and init_args."""
INTERPRETERS = {"VLLMEngine": PYTHON}
"""The engines that need another Python than the tests."""
WARM_UP = {"trainer.max_steps": 190, "trainer.val_check_interval": 190}


def command(verb: str, config: str, settings: Mapping[str, Any], *, engine: str = "HFEngine"):
    """Return the command line of a run in the directory ``run``."""
    python = INTERPRETERS.get(engine, sys.executable)
    words = [str(python), "-m", "lit_grpo", verb, "--config", config, "--run_dir", "run"]
    return words + engine_options(engine) + as_options(settings)


def engine_options(engine: str) -> list[str]:
    """Return the options that choose and configure an engine."""
    settings = dict(SETTINGS[engine])
    config = ["--config", settings.pop("config")] if settings else []
    return config + as_options(
        {f"model.engine.init_args.{name}": value for name, value in settings.items()}
    )


def as_options(settings: Mapping[str, Any]) -> list[str]:
    return [
        f"--{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in settings.items()
    ]


def start(words: list[str], cwd: Path, **variables: str) -> Popen[str]:
    """Start a command in a process group of its own; its output goes to ``said.txt``."""
    return processes.start(words, cwd, said=cwd / "said.txt", **ENV | variables)


def running(words: list[str], cwd: Path, **variables: str) -> AbstractContextManager[Popen[str]]:
    """Start a command as `start` does, and kill its process group in the end."""
    return processes.running(words, cwd, said=cwd / "said.txt", **ENV | variables)


def run_to_its_end(words: list[str], cwd: Path, *, seconds: float = 600, **variables: str) -> None:
    with running(words, cwd, **variables) as process:
        exit_code = process.wait(seconds)
    assert exit_code == 0, (cwd / "said.txt").read_text()[-5000:]


def warmed_up(tmp_path_factory) -> Path:
    """Return a model that solves some of the quickstart's sums."""
    warm_up = partial(run_to_its_end, command("sft", "quickstart_sft", WARM_UP))
    return built_once("warm_up", warm_up, tmp_path_factory) / "run" / "final"


def num_steps(cwd: Path) -> int:
    """Return the number of rollout steps that the run has logged so far."""
    return _checks.num_steps(cwd / "run" / "metrics.csv")
