"""Heads that run in chunks, unlike many on two real processes that share a policy; and bfloat16."""

from pathlib import Path

import pytest
import torch
from needs import needs_deepspeed
from safetensors.torch import load_file
from tiny import tiny_policy

pytestmark = pytest.mark.slow

HEAD, ADAPTED = "chunks, trained head", "chunks, adapted head"
FSDP2 = [
    *(
        f"{case}/{strategy}"
        for case in ("chunks", HEAD, ADAPTED, "rounded")
        for strategy in ("ddp", "fsdp2")
    ),
    "chunks, mixed/ddp",
]
ZERO = [
    *("chunks/zero2", "chunks/zero3", "chunks, mixed/zero3"),
    *(f"{case}/{strategy}" for case in (HEAD, ADAPTED) for strategy in ("zero2", "zero3")),
]
CASES = [
    ("chunks", "fsdp2"),
    (HEAD, "fsdp2"),
    (ADAPTED, "fsdp2"),
    pytest.param("chunks", "zero2", marks=needs_deepspeed),
    pytest.param("chunks", "zero3", marks=needs_deepspeed),
    pytest.param(HEAD, "zero2", marks=needs_deepspeed),
    pytest.param(ADAPTED, "zero2", marks=needs_deepspeed),
]


def run(importer, directory: Path, names: list[str]) -> None:
    importer.run(["2", *names], directory, num_ranks=2, program="chunked_trainings", seconds=300)


@pytest.fixture(scope="module")
def trained(importer, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("chunks")
    tiny_policy(seed=7, dtype="bfloat16").save_pretrained(directory / "rounded")
    run(importer, directory, FSDP2)
    return directory


@pytest.fixture(scope="module")
def zero(importer, trained) -> Path:
    run(importer, trained, ZERO)
    return trained


@pytest.fixture
def results(strategy, request) -> Path:
    return request.getfixturevalue("zero" if strategy in ("zero2", "zero3") else "trained")


def load(directory: Path, case: str, strategy: str):
    return [torch.load(directory / f"{case}-{strategy}-rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize(("case", "strategy"), CASES)
def test_ranks_with_unlike_numbers_of_chunks_take_the_steps_of_ddp(results, case, strategy):
    """Stage 3 would wait for ever if it collected the head for each chunk."""
    for one, other in zip(load(results, case, "ddp"), load(results, case, strategy), strict=True):
        for name, weight in one["weights"].items():
            torch.testing.assert_close(other["weights"][name], weight, rtol=0, atol=1e-5)
        norms = [[step["policy/grad_norm"] for step in run["metrics"]] for run in (one, other)]
        assert len(norms[0]) == 5
        assert norms[0] == pytest.approx(norms[1], rel=1e-6)


@needs_deepspeed
def test_under_autocast_ranks_with_unlike_numbers_of_chunks_take_the_steps_of_ddp(zero):
    """Only the first two gradients are alike on every CPU: see the test of DeepSpeed's stages."""
    case = "chunks, mixed"
    for one, other in zip(load(zero, case, "ddp"), load(zero, case, "zero3"), strict=True):
        norms = [[step["policy/grad_norm"] for step in run["metrics"]] for run in (one, other)]
        assert len(norms[0]) == len(norms[1]) == 5
        assert norms[0][0] == pytest.approx(norms[1][0], rel=1e-6)
        assert norms[0][1] == pytest.approx(norms[1][1], rel=1e-3)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", pytest.param("zero3", marks=needs_deepspeed)])
def test_the_copy_that_is_sent_to_servers_is_whole_and_on_one_rank(results, strategy):
    first, second = load(results, "chunks", strategy)
    assert first["sent"].keys() == first["weights"].keys()
    for name, weight in first["weights"].items():
        assert first["sent"][name].equal(weight.bfloat16()), name
    assert second["sent"] == {}


@needs_deepspeed
@pytest.mark.parametrize("case", [HEAD, ADAPTED])
def test_a_head_of_several_layers_is_refused_in_stage_3_of_deepspeed(zero, case):
    for rank in load(zero, case, "zero3"):
        assert "model.policy.lora must leave the output layer as it is" in rank["error"]


def test_fsdp2_in_mixed_precision_takes_the_first_step_of_bfloat16_weights(trained):
    """DDP computes the same on weights in bfloat16, whose masters are in float32.

    Only the gradients differ: DDP sums micro-batches and ranks in bfloat16, FSDP2 in float32. After
    a step the masters differ, and so would the weights that they are rounded to.
    """
    start = load_file(trained / "rounded" / "model.safetensors")
    runs = (load(trained, "rounded", strategy) for strategy in ("ddp", "fsdp2"))
    for one, other in zip(*runs, strict=True):
        assert one["sampled"] == other["sampled"]
        first, second = one["metrics"], other["metrics"]
        assert first["policy/loss"] == second["policy/loss"] != 0
        assert first["policy/entropy"] == second["policy/entropy"]
        assert first["policy/grad_norm"] == pytest.approx(second["policy/grad_norm"], rel=2**-8)
        expected, found = (
            torch.cat(
                [(run["weights"][n] - weight.float()).flatten() for n, weight in start.items()]
            )
            for run in (one, other)
        )
        assert (found - expected).norm() < 2**-8 * expected.norm()


def test_rounding_in_mixed_precision_is_no_obstacle_to_packing(trained):
    assert "cannot run packed" not in (trained / "said0.txt").read_text()
