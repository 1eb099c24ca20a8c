"""Policies of many architectures, with perturbed weights."""

from collections.abc import Callable
from pathlib import Path

import tiny
import torch
import torch.distributed
import torch.multiprocessing
from safetensors.torch import load_file
from tiny import LLAMA, tiny_policy
from torch.distributed.fsdp import fully_shard

from lit_grpo.policy import LoRA, Policy

TIED = LLAMA | {"tie_word_embeddings": True}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
QWEN3_MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 8,
}
POLICIES = {
    "llama": {},
    "tied llama": {"architecture": TIED},
    "gpt2": {"architecture": GPT2},
    "mixtral": {"architecture": MIXTRAL},
    "qwen3_moe": {"architecture": QWEN3_MOE},
    "llama with lora": {"lora": LoRA(rank=3)},
    "tied llama with lora": {"architecture": TIED, "lora": LoRA(rank=3)},
    "gpt2 with lora": {"architecture": GPT2, "lora": LoRA(rank=3)},
    "bfloat16 llama with float32 lora": {"dtype": "bfloat16", "lora": LoRA(rank=3)},
    "lora on embeddings": {"lora": LoRA(rank=3, target_modules=["embed_tokens", "lm_head"])},
    "lora on experts": {
        "architecture": MIXTRAL,
        "lora": LoRA(rank=3, target_modules=["q_proj", "w1", "w2", "w3"]),
    },
    "a head trained in full": {"lora": LoRA(rank=3, modules_to_save=["lm_head"])},
    "a tied head trained in full": {
        "architecture": GPT2,
        "lora": LoRA(rank=3, modules_to_save=["lm_head"]),
    },
}
ADAPTED = [name for name in POLICIES if "lora" in name and "experts" not in name]


def perturbed(name: str, **settings) -> Policy:
    return tiny.perturbed(tiny_policy(**POLICIES[name] | settings))


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    """Return the weights in all safetensors files of a directory."""
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        weights |= load_file(file)
    return weights


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    torch.testing.assert_close(actual, expected)


def run_two_ranks(function: Callable[[int, Path], None], directory: Path) -> None:
    """Run a function in two processes; forked ones, which need not import torch again."""
    torch.multiprocessing.start_processes(function, (directory,), nprocs=2, start_method="fork")


def shard(model):
    """Shard a model over the two processes of the default group."""
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    decoder = model.get_decoder()
    for layer in decoder.h if hasattr(decoder, "h") else decoder.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)
