"""A save writes what peft and transformers write, with little memory."""

import copy
import ctypes
import json
import re
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch
from forked import run_in_processes
from live_bytes import LiveBytes
from tiny import LLAMA, tiny_policy
from transformers import AutoModelForCausalLM
from weight_policies import POLICIES, perturbed, read_weights

from lit_grpo.policy.files.model_files import file_bytes, save_model
from lit_grpo.policy.lora import LoRA

M_MMAP_THRESHOLD = -3


def write_with_peft(policy, directory: Path, **settings) -> None:
    """Merge the adapter in a copy of the whole model and write it."""
    model = copy.deepcopy(policy.model)
    merged = model if policy.lora is None else model.merge_and_unload()
    merged.save_pretrained(directory, **settings)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", POLICIES)
def test_all_files_are_bit_by_bit_those_of_peft_and_transformers(name, dtype, tmp_path):
    policy = perturbed(name, dtype=dtype)
    save_model(policy.model, tmp_path / "ours")
    write_with_peft(policy, tmp_path / "theirs")
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")


@pytest.mark.parametrize("name", ["tied llama with lora", "mixtral"])
def test_several_files_have_the_index_of_transformers(name, tmp_path):
    policy = perturbed(name)
    save_model(policy.model, tmp_path / "ours", shard_bytes=20_000)
    write_with_peft(policy, tmp_path / "theirs", max_shard_size=20_000)
    ours, theirs = (
        json.loads((tmp_path / one / "model.safetensors.index.json").read_text())
        for one in ("ours", "theirs")
    )
    assert ours["metadata"] == theirs["metadata"]
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    written = [read_weights(tmp_path / one) for one in ("ours", "theirs")]
    torch.testing.assert_close(*written, rtol=0, atol=0)


WRITTEN = {
    "full": {},
    "tied": {"architecture": LLAMA | {"tie_word_embeddings": True}},
    "merged": {"lora": LoRA(rank=2)},
    "adapter": {"lora": LoRA(rank=2), "merge_lora": False},
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_what_a_save_writes_and_copies_is_known_before(kind, tmp_path):
    settings = WRITTEN[kind]
    if kind == "adapter":
        tiny_policy().save_pretrained(tmp_path / "base")
        settings = settings | {"architecture": None, "path": str(tmp_path / "base")}
    policy = tiny_policy(**settings)
    policy.save_pretrained(tmp_path / "new")
    weights = [*read_weights(tmp_path / "new").values()]
    num_bytes, copied = policy.saved_bytes()
    assert num_bytes == sum(one.nbytes for one in weights)
    assert copied == (num_bytes if kind == "merged" else 0)


@pytest.mark.parametrize("shard_bytes", [1, 20_000, 10**9])
def test_a_file_is_as_large_as_is_said(shard_bytes, tmp_path):
    model = tiny_policy().model
    save_model(model, tmp_path, shard_bytes=shard_bytes)
    sizes = [one.nbytes for one in model.parameters()]
    files = [safetensors.torch.load_file(one) for one in tmp_path.glob("*.safetensors")]
    largest = max(sum(one.nbytes for one in file.values()) for file in files)
    said = file_bytes(sum(sizes), max(sizes), shard_bytes)
    assert said / 2 < largest <= said


def test_weights_of_an_earlier_save_are_replaced_and_other_files_stay(tmp_path):
    save_model(tiny_policy().model, tmp_path)
    (tmp_path / "notes.txt").touch()
    policy = tiny_policy(seed=1)
    save_model(policy.model, tmp_path, shard_bytes=20_000)
    assert not (tmp_path / "model.safetensors").exists()
    assert (tmp_path / "notes.txt").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(
        dict(loaded.state_dict()), dict(policy.model.state_dict()), rtol=0, atol=0
    )
    save_model(policy.model, tmp_path)
    assert len(list(tmp_path.glob("model*"))) == 1


CODE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

class ScaledConfig(LlamaConfig):
    model_type = "scaled_llama"

class ScaledLlama(LlamaForCausalLM):
    config_class = ScaledConfig
"""


def test_the_code_of_a_model_from_the_hub_is_written_with_it(tmp_path):
    policy = tiny_policy()
    config = policy.model.config.to_dict() | {
        "model_type": "scaled_llama",
        "auto_map": {
            "AutoConfig": "scaled_llama.ScaledConfig",
            "AutoModelForCausalLM": "scaled_llama.ScaledLlama",
        },
    }
    start = tmp_path / "start"
    policy.save_pretrained(start)
    (start / "config.json").write_text(json.dumps(config))
    (start / "scaled_llama.py").write_text(CODE)
    settings = {"path": str(start), "architecture": None, "trust_remote_code": True}
    custom = tiny_policy(**settings)
    custom.save_pretrained(tmp_path / "saved")
    assert "ScaledLlama" in (tmp_path / "saved/scaled_llama.py").read_text()
    again = tiny_policy(**settings | {"path": str(tmp_path / "saved")})
    assert type(again.model).__name__ == "ScaledLlama"


def peak_on_the_device(directory: Path, **settings) -> tuple[int, int, int]:
    """Return what a save adds on a GPU, and the bytes of the largest weight and of all."""
    from pretend_device import DEVICE, PretendTensor, pretend_device

    with pretend_device():
        policy = tiny_policy(**settings)
        policy.model.to(DEVICE)
        sizes = [one.nbytes for one in policy.model.parameters()]
        with LiveBytes(lambda one: one.inner if isinstance(one, PretendTensor) else None) as live:
            save_model(policy.model, directory)
        assert all(isinstance(one.data, PretendTensor) for one in policy.model.parameters())
    return live.peak, max(sizes), sum(sizes)


@pytest.mark.parametrize("settings", [{}, {"lora": LoRA(rank=4)}], ids=["full", "lora"])
def test_a_save_adds_nothing_on_a_gpu_but_a_layer_that_is_merged(settings, tmp_path):
    ((peak, largest, total),) = run_in_processes(partial(peak_on_the_device, tmp_path, **settings))
    assert (peak > 0) == bool(settings)
    assert peak <= 2 * largest < total / 2
    assert (tmp_path / "model.safetensors").stat().st_size > total / 2


def peak() -> float:
    """Return the highest memory of this process so far, in MB."""
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def growth_of_a_save(directory: Path, **settings) -> float:
    """Return by how many MB the peak memory grows as a model is saved in files of 40 MB."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 17)  # large tensors are freed at once
    layers = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12}
    heads = {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 8}
    policy = tiny_policy(architecture=layers | heads, **settings)
    save_model(tiny_policy(**settings).model, directory / "first")  # loads what a save needs
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = peak()
    save_model(policy.model, directory, shard_bytes=40_000_000)
    return peak() - before


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"lora": LoRA()}], ids=["full", "lora"])
def test_a_save_takes_the_memory_of_one_file(settings, tmp_path):
    (growth,) = run_in_processes(partial(growth_of_a_save, tmp_path, **settings))
    size = sum(path.stat().st_size for path in tmp_path.glob("model-*.safetensors"))
    assert size > 190e6
    assert growth < 100  # MB
