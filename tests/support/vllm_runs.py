"""Run programs in the environment of a real vLLM, and compare their results."""

import json
import os
import subprocess
from typing import Any

import pytest
from built_once import built_once
from paths import ROOT, SUPPORT
from vllm_environment import ENV, PYTHON


def run(*arguments, cwd):
    """Run a program in vLLM's environment; if it fails, show its output."""
    process = subprocess.run(
        [str(PYTHON), *map(str, arguments)],
        cwd=cwd,
        env=os.environ | ENV,
        capture_output=True,
        text=True,
        timeout=1100,
    )
    assert process.returncode == 0, process.stdout + process.stderr


def in_process_checks(tmp_path_factory) -> dict[str, Any]:
    """Return what the program `_vllm_checks` has found."""

    def check(directory):
        run(SUPPORT / "_vllm_checks.py", directory / "checks.json", cwd=ROOT)

    directory = built_once("vllm_checks", check, tmp_path_factory)
    return json.loads((directory / "checks.json").read_text())


def assert_same_logprobs(completions, trainer_logprobs):
    assert all(completion["token_ids"] for completion in completions)
    for completion, expected in zip(completions, trainer_logprobs, strict=True):
        assert completion["sampler_logprobs"] == pytest.approx(expected, abs=1e-4)
