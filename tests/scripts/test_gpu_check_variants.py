"""The ways of a step that only a GPU shows are tried one by one, and run on a CPU as well."""

from __future__ import annotations

import importlib
import time
from functools import partial
from pathlib import Path

import pytest
from forked import run_in_processes
from needs import needs_deepspeed

findings, sizes, variants = (
    importlib.import_module(f"_gpu_check.{name}") for name in ("findings", "sizes", "variants")
)
Device = importlib.import_module("_gpu_check.device").Device


def statuses(path: Path) -> dict[str, str]:
    found = (one for one in findings.read(path) if one["kind"] == "finding")
    return {one["name"]: one["status"] for one in found}


def statuses_of_variants(path: Path, tried: dict[str, dict]) -> dict[str, str]:
    """Return what variants give on the CPU, in a process that may become one of a group."""
    recorder = findings.Recorder("variants", path, time.monotonic() + 60)
    variants.VARIANTS = tried
    variants.check_variants(recorder, Device("cpu"), sizes.TINY)
    return statuses(path)


def test_a_variant_that_fails_leaves_the_next_one_alone(tmp_path):
    tried = {"failing": {"strategy": "none"}, "FSDP2": {"strategy": "fsdp2"}}
    (found,) = run_in_processes(partial(statuses_of_variants, tmp_path / "records", tried))
    assert found.pop("failing") == "failed"
    assert len(found) == 2
    assert {*found.values()} == {"passed"}


@pytest.mark.slow
def test_steps_with_checkpointing_and_with_bfloat16_weights_train(tmp_path):
    tried = {
        name: one
        for name, one in variants.VARIANTS.items()
        if not {"strategy", "compile"} & one.keys() and name not in variants.PACKAGES
    }
    (found,) = run_in_processes(partial(statuses_of_variants, tmp_path / "records", tried))
    assert len(found) == 2 * len(tried) == 4
    assert {*found.values()} == {"passed"}


@needs_deepspeed
@pytest.mark.slow  # imports DeepSpeed, which takes seconds
def test_steps_with_deepspeed_and_with_weights_in_host_memory_train(tmp_path):
    tried = {name: one for name, one in variants.VARIANTS.items() if "strategy" in one}
    (found,) = run_in_processes(partial(statuses_of_variants, tmp_path / "records", tried))
    assert len(found) == 2 * len(tried) == 6
    assert {*found.values()} == {"passed"}


@pytest.mark.parametrize(
    ("device", "seconds"), [("pretend", 60), pytest.param("cpu", 5, marks=pytest.mark.slow)]
)
def test_variants_are_skipped_without_time_and_on_the_stand_in(device, seconds, tmp_path):
    recorder = findings.Recorder("variants", tmp_path / "records", time.monotonic() + seconds)
    variants.check_variants(recorder, Device(device), sizes.TINY)
    assert statuses(recorder.path) == dict.fromkeys(variants.VARIANTS, "skipped")
