"""Saved weights do not change with the policy, and old versions are removed."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_policy
from weight_policies import assert_same, perturbed, read_weights, run_two_ranks, shard

from lit_grpo.policy import LoRA
from lit_grpo.policy.named_weights import named_weights
from lit_grpo.rollout.weights.store import WeightStore

SHARDED = ["llama", "tied llama with lora", "mixtral"]


def make_store(directory: Path, *, dtype=torch.float32, **settings) -> WeightStore:
    defaults = {"is_adapter": False, "in_files": False, "is_writer": True}
    return WeightStore(directory, dtype=dtype, **(defaults | settings))


def test_weights_in_memory_are_a_copy_in_the_servers_dtype(tmp_path):
    policy = tiny_policy()
    expected = {name: weight.bfloat16() for name, weight in named_weights(policy.model)}
    exact = {name: weight.clone() for name, weight in named_weights(policy.model)}
    half = make_store(tmp_path, dtype=torch.bfloat16).save(policy, 3).host_weights
    full = make_store(tmp_path).save(policy, 3).host_weights
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.zero_()
    assert_same(dict(half.tensors), expected)
    assert_same(dict(full.tensors), exact)
    assert half.device == torch.device("cpu")
    assert not list(tmp_path.iterdir())


def test_weights_in_files_have_a_directory_per_version(tmp_path):
    policy = tiny_policy()
    store = make_store(tmp_path, in_files=True)
    updates = [store.save(policy, version) for version in (3, 4, 5)]
    assert updates[0].path == tmp_path / "v3"
    assert updates[0].adapter is None
    assert_same(read_weights(updates[0].path), dict(named_weights(policy.model)))
    store.remove_all_but({4, 5})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v4", "v5"]
    make_store(tmp_path, in_files=True, is_writer=False).remove_all_but(set())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v4", "v5"]


def test_an_adapter_is_saved_alone_under_a_name_of_its_version(tmp_path):
    policy = tiny_policy(lora=LoRA(rank=2))
    update = make_store(tmp_path, is_adapter=True).save(policy, 7)
    assert update.adapter is update
    assert update.name == "policy-v7"
    assert {path.name for path in update.path.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


def save_sharded(rank: int, directory: Path) -> None:
    """Shard each policy over two processes, and save it on the first one."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2
    )
    store = make_store(directory, is_writer=rank == 0)
    models = [shard(perturbed(name).model) for name in SHARDED]
    saved = [store.save(SimpleNamespace(model=model), 3) for model in models]
    torch.save(saved, directory / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_the_first_of_two_ranks_saves_the_whole_of_a_sharded_policy(tmp_path):
    run_two_ranks(save_sharded, tmp_path)
    first, second = (torch.load(tmp_path / f"rank{n}.pt", weights_only=False) for n in (0, 1))
    assert first == second  # updates are equal, wherever the weights are
    for name, mine, other in zip(SHARDED, first, second, strict=True):
        assert other.host_weights is None
        assert_same(dict(mine.host_weights.tensors), dict(named_weights(perturbed(name).model)))
