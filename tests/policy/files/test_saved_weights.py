"""What is read weight by weight is what `transformers` loads as a whole."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import LLAMA, tiny_policy
from weight_policies import MIXTRAL, QWEN3_MOE

from lit_grpo.policy.files.loading import outline_model
from lit_grpo.policy.files.model_files import save_model
from lit_grpo.policy.files.saved_weights import SavedWeights, find_weights
from lit_grpo.policy.named_weights import base_weights

DEEPSEEK = LLAMA | {
    "model_type": "deepseek_v3",
    "num_key_value_heads": LLAMA["num_attention_heads"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
}
OLMOE = LLAMA | {"model_type": "olmoe", "num_experts": 11, "num_experts_per_tok": 2}
"""More than ten experts, whose order is not that of their names."""
ARCHITECTURES = {
    "llama": LLAMA,
    "tied": LLAMA | {"tie_word_embeddings": True},
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE,
    "deepseek_v3": DEEPSEEK,
    "olmoe": OLMOE,
}
MODEL = "model.safetensors"


def saved(directory: Path, name: str) -> Path:
    """Write a model in several files."""
    policy = tiny_policy(architecture=ARCHITECTURES[name], seed=7)
    save_model(policy.model, directory, shard_bytes=20_000)
    policy.tokenizer.save_pretrained(directory)
    return directory


def found_in(directory: Path) -> SavedWeights | None:
    options = {"dtype": "float32", "attn_implementation": None, "trust_remote_code": False}
    return find_weights(directory, outline_model(str(directory), **options))


def rewrite(directory: Path, change) -> None:
    """Write the weights, changed, in one file."""
    weights = {}
    for path in directory.glob("*.safetensors"):
        weights |= load_file(path)
        path.unlink()
    (directory / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file(change(weights), directory / MODEL, metadata={"format": "pt"})


def assert_read_as_loaded(directory: Path) -> None:
    model = tiny_policy(path=str(directory), architecture=None).model
    expected, weights = base_weights(model), found_in(directory)
    assert weights is not None
    with weights.opened() as files:
        read = {name: files[source].get_tensor(source) for name, source in weights.names.items()}
        read |= dict(weights.converted(model, files))
    assert read.keys() == expected.keys()
    for name, value in read.items():
        assert value.equal(expected[name]), name


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_weights_are_read_as_transformers_loads_them(tmp_path, name):
    assert_read_as_loaded(saved(tmp_path, name))


def test_experts_of_a_layer_are_converted_together_and_the_others_are_read_as_they_are(tmp_path):
    weights = found_in(saved(tmp_path, "mixtral"))
    assert weights is not None
    targets = {one.target.split("experts.")[1]: len(one.patterns) for one in weights.conversions}
    assert targets == {"gate_up_proj": 8, "down_proj": 4}
    renamed = {name: source for name, source in weights.names.items() if name != source}
    assert renamed == {
        f"model.layers.{n}.mlp.gate.weight": f"model.layers.{n}.block_sparse_moe.gate.weight"
        for n in (0, 1)
    }


def test_files_may_lack_the_prefix_of_the_base_model_or_have_more_than_it_needs(tmp_path):
    saved(tmp_path, "tied")
    rewrite(tmp_path, lambda weights: {n.removeprefix("model."): w for n, w in weights.items()})
    assert_read_as_loaded(tmp_path)
    saved(tmp_path / "more", "mixtral")
    rewrite(tmp_path / "more", lambda weights: weights | {"extra.weight": torch.zeros(2)})
    assert_read_as_loaded(tmp_path / "more")


def without_an_expert(weights):
    return {name: one for name, one in weights.items() if not re.search(r"experts\.3\.w1", name)}


def smaller_expert(weights):
    return {n: w[:-1].contiguous() if "experts.3.w1" in n else w for n, w in weights.items()}


@pytest.mark.parametrize("change", [without_an_expert, smaller_expert])
def test_files_without_all_that_a_weight_is_made_of_do_not_have_the_model(tmp_path, change):
    saved(tmp_path, "mixtral")
    rewrite(tmp_path, change)
    assert found_in(tmp_path) is None


def test_quantized_weights_are_left_to_transformers(tmp_path):
    config = saved(tmp_path, "llama") / "config.json"
    settings = json.loads(config.read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    config.write_text(json.dumps(settings))
    assert found_in(tmp_path) is None
