"""A compiled policy with an adapter, which two processes share, trains as any and resumes."""

from pathlib import Path

import pytest
import torch
from needs import needs_deepspeed

pytestmark = pytest.mark.slow

CASE, PLAIN = "compile lora", "shallow lora"


@pytest.fixture(scope="module")
def directory(importer, tmp_path_factory) -> Path:
    """Return a directory with two runs under DDP, of which one is compiled, and then resumed."""
    directory = tmp_path_factory.mktemp("compiled")
    run(importer, directory, f"{PLAIN}/ddp", f"{CASE}/ddp", f"{CASE}/ddp:ddp:3")
    return directory


def run(importer, directory: Path, *names: str) -> None:
    importer.run(["2", *names], directory, num_ranks=2, program="sharded_trainings", seconds=300)


def load(directory: Path, case: str, training: str) -> dict[str, torch.Tensor]:
    return torch.load(directory / f"{case}-{training}-rank0.pt")["weights"]


def assert_as_plain(directory: Path, found: dict[str, torch.Tensor]) -> None:
    for name, weight in load(directory, PLAIN, "ddp").items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-5)


def test_ddp_trains_compiled_as_without_and_resumes_bit_identically(directory):
    whole, resumed = (load(directory, CASE, training) for training in ("ddp", "ddp:ddp:3"))
    assert_as_plain(directory, whole)
    assert all(resumed[name].equal(weight) for name, weight in whole.items())


def test_fsdp2_goes_on_compiled_from_a_checkpoint_of_ddp(importer, directory):
    run(importer, directory, f"{CASE}/fsdp2:ddp:3")
    assert_as_plain(directory, load(directory, CASE, "fsdp2:ddp:3"))


@needs_deepspeed
@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_deepspeed_trains_compiled_and_resumes_bit_identically(importer, directory, stage):
    trainings = (stage, f"{stage}:{stage}:3")
    run(importer, directory, *(f"{CASE}/{training}" for training in trainings))
    whole, resumed = (load(directory, CASE, training) for training in trainings)
    assert_as_plain(directory, whole)
    assert all(resumed[name].equal(weight) for name, weight in whole.items())
