"""Each rank reads its partitions: put together, they are the weights of the files."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from tiny import tiny_policy

from lit_grpo.policy.files.partition_loading import load_partitions
from lit_grpo.policy.files.saved_weights import SavedWeights

SHAPES = {"matrix": (5, 3), "vector": (7,), "cube": (4, 2, 3), "small": (2,), "single": ()}


def partitioned(shape: tuple[int, ...], rank: int, num_ranks: int) -> SimpleNamespace:
    """Return a weight as DeepSpeed describes it; what is not written to stays -1."""
    numel = torch.Size(shape).numel()
    return SimpleNamespace(
        ds_shape=torch.Size(shape),
        ds_numel=numel,
        ds_tensor=torch.full([-(-numel // num_ranks)], -1.0),
        ds_zero_partition_rank=rank,
    )


def load(weights: dict[str, SimpleNamespace], directory: Path) -> None:
    saved = SavedWeights(directory, {name: name for name in weights}, [], [])
    with saved.opened() as files:
        load_partitions(weights, tiny_policy().model, saved, files)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_the_partitions_of_all_ranks_are_the_weights_and_the_rest_is_padding(tmp_path, num_ranks):
    weights = {name: torch.rand(shape) for name, shape in SHAPES.items()}
    for name, weight in weights.items():  # in several files
        save_file({name: weight}, tmp_path / f"{name}.safetensors")
    ranks = [
        {name: partitioned(shape, rank, num_ranks) for name, shape in SHAPES.items()}
        for rank in range(num_ranks)
    ]
    for rank in ranks:
        load(rank, tmp_path)
    for name, weight in weights.items():
        found = torch.cat([rank[name].ds_tensor for rank in ranks])
        assert found[: weight.numel()].equal(weight.flatten())
        assert found[weight.numel() :].eq(-1).all()


def test_values_get_the_type_of_the_weight(tmp_path):
    save_file({"vector": torch.tensor([0.5, 2.0]).bfloat16()}, tmp_path / "model.safetensors")
    weight = partitioned((2,), 0, 1)
    load({"vector": weight}, tmp_path)
    assert weight.ds_tensor.tolist() == [0.5, 2.0]
