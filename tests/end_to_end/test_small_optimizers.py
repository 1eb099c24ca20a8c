"""Optimizers of torchao and bitsandbytes on two processes: what they keep, resume and refuse."""

from pathlib import Path

import pytest
import torch
from needs import needs_bitsandbytes, needs_deepspeed, needs_torchao

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ZERO = [pytest.param(one, marks=needs_deepspeed) for one in ("zero2", "zero3")]


def run(importer, directory: Path, name: str, strategy: str) -> dict:
    words = ["2", f"adamw/{strategy}", f"{name}/{strategy}"]
    program = "small_optimizer_trainings"
    importer.run(words, directory, num_ranks=2, program=program, seconds=300)
    adamw, found = (torch.load(directory / f"{one}-{strategy}.pt") for one in ("adamw", name))
    if "error" not in found:
        for key, weight in found["resumed"].items():
            assert torch.equal(weight, found["weights"][key]), key
        found["moved"] = {
            key: (weight - adamw["weights"][key]).abs() for key, weight in found["weights"].items()
        }
    return found


@needs_torchao
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_torchao_keeps_8_bits_of_each_part_and_resumes_bit_identically(
    strategy, importer, tmp_path
):
    """Nearly all weights are within a tenth of a step of AdamW's, the rest are the library's."""
    found = run(importer, tmp_path, "torchao", strategy)
    assert "OptimState8bit torch.float32" in found["states"]
    moved = torch.cat([one.flatten() for one in found["moved"].values()])
    assert 0 < moved.mean() < 1e-4
    assert (moved > 1e-3).double().mean() < 1e-3


@needs_bitsandbytes
@pytest.mark.parametrize("strategy", ["ddp", *ZERO])
def test_bitsandbytes_keeps_8_bits_and_resumes_bit_identically(strategy, importer, tmp_path):
    found = run(importer, tmp_path, "bitsandbytes", strategy)
    assert "Tensor torch.uint8" in found["states"]
    assert 0 < max(float(one.max()) for one in found["moved"].values()) < 3e-3


@needs_bitsandbytes
def test_bitsandbytes_is_refused_for_weights_that_fsdp2_has_sharded(importer, tmp_path):
    found = run(importer, tmp_path, "bitsandbytes", "fsdp2")
    assert found["error"].startswith("optimizer must be another one with trainer.strategy fsdp2")
