"""Run `lit-grpo` in a process of its own, with each of the engines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import sglang_server
from vllm_environment import PYTHON
from vllm_settings import ENV

SETTINGS: dict[str, dict[str, Any]] = {
    "HFEngine": {},
    "VLLMServerEngine": {"config": "engines/vllm_server_cpu", "launch.python": str(PYTHON)},
    "VLLMEngine": {"config": "engines/vllm_cpu"},
    "SGLangEngine": {
        "config": "engines/sglang",
        "launch.dtype": "float32",
        "launch.program": [sys.executable, sglang_server.__file__],
    },
}
"""What a config needs to sample with an engine on a CPU: a further config, and init_args."""
INTERPRETERS = {"VLLMEngine": PYTHON}
"""The engines that need another Python than the tests."""


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


def start(words: list[str], cwd: Path, **variables: str) -> subprocess.Popen[str]:
    """Start a command in a process group of its own; its output goes to ``said.txt``."""
    with (cwd / "said.txt").open("w") as said:
        return subprocess.Popen(
            words,
            cwd=cwd,
            env=os.environ | ENV | variables,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            text=True,
            start_new_session=True,
        )


def run_to_its_end(words: list[str], cwd: Path, *, seconds: float = 600) -> None:
    with running(words, cwd) as process:
        exit_code = process.wait(seconds)
    assert exit_code == 0, (cwd / "said.txt").read_text()[-5000:]


@contextmanager
def running(words: list[str], cwd: Path, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Start a command, and kill its process group in the end."""
    process = start(words, cwd, **variables)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def num_steps(cwd: Path) -> int:
    """Return the number of rollout steps that the run has logged so far."""
    path = cwd / "run" / "metrics.csv"
    return len(path.read_text().splitlines()) - 1 if path.exists() else 0
