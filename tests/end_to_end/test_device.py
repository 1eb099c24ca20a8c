"""Trainings on a device that refuses to mix with CPU tensors, as a GPU does.

They end with the policy that the CPU learns, and the host does not wait for the device in between.
"""

from __future__ import annotations

import json
import sys
from importlib.resources import files

import pytest
from paths import SUPPORT
from processes import run_program

PRESETS = sorted(path.name for path in (files("lit_grpo.configs") / "presets").iterdir())
RUNS = (
    *("plain", "lora", "reference", "reference adapter", "KL in the reward", "updates", "entropy"),
    *("teacher", "top tokens of a teacher", "merged", "parts"),
)
PADDED = "padded"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results() -> dict:
    """What `device_trainings` prints."""
    program = [sys.executable, str(SUPPORT / "device_trainings.py")]
    return json.loads(run_program(program).stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [*RUNS, PADDED])
def test_a_training_ends_with_the_policy_that_the_cpu_learns(results, name):
    run = results["runs"][name]
    assert run["difference"] < 1e-5 < 1e-3 < run["learned"]
    assert run["uses_packing"] is (name != PADDED)


@pytest.mark.parametrize("name", [*RUNS, PADDED])
def test_the_device_samples_with_the_logprobs_of_the_trainer(results, name):
    assert 0 < results["runs"][name]["sampler_difference"] < 1e-5


def test_weights_in_bfloat16_with_masters_in_float32_are_those_of_the_cpu(results):
    run = results["bfloat16"]
    assert run["difference"] <= 2**-10 < 2**-6 < run["learned"]  # the last bit of a weight
    assert run["uses_packing"]


def test_the_cpu_learns_the_same_from_the_completions_of_the_device(results):
    assert results["replayed"]["difference"] < 1e-5 < 1e-3 < results["replayed"]["learned"]


def test_every_run_is_compared(results):
    assert set(results["runs"]) == {*RUNS, PADDED}


@pytest.mark.parametrize("name", PRESETS)
def test_the_loss_of_a_preset_is_that_of_the_cpu(results, name):
    assert results["presets"][name] < 1e-6


def test_a_resumed_training_is_the_undisturbed_one(results):
    assert results["difference_after_a_resume"] == 0


def test_an_evaluation_gives_the_metrics_of_the_cpu(results):
    on_cpu, on_device = results["metrics"]
    assert "val/accuracy" in on_cpu
    assert on_device == pytest.approx(on_cpu)


def test_the_host_waits_for_no_micro_batch(results):
    few, many = results["few_micro_batches"], results["many_micro_batches"]
    assert many["micro_batches"] > few["micro_batches"]
    assert many["waits"] == few["waits"]


def test_the_host_waits_once_for_each_sampled_token(results):
    waits = results["sampling_waits"]
    assert waits["24 tokens"] == waits["8 tokens"] + 16
    assert waits["24 tokens, rows end"] == waits["24 tokens"]
    assert waits["24 tokens, stop strings"] == waits["24 tokens"]
    assert waits["24 tokens, unlike prompts"] == waits["8 tokens, unlike prompts"] + 16
