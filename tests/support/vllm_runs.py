"""Run programs in the environment of a real vLLM, and compare their results."""

import os
import subprocess

import pytest
from vllm_environment import ENV, PYTHON


def run(*arguments, cwd):
    """Run a program in vLLM's environment; if it fails, show its output."""
    process = subprocess.run(
        [str(PYTHON), *map(str, arguments)],
        cwd=cwd,
        env=os.environ | ENV,
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert process.returncode == 0, process.stdout + process.stderr


def assert_same_logprobs(completions, trainer_logprobs):
    assert all(completion["token_ids"] for completion in completions)
    for completion, expected in zip(completions, trainer_logprobs, strict=True):
        assert completion["sampler_logprobs"] == pytest.approx(expected, abs=1e-4)
