"""Weights have the names and values of the written policy, whatever its architecture."""

import copy
from pathlib import Path

import pytest
import torch
from tiny import LLAMA, tiny_policy
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import GroupWeightRename
from weight_policies import POLICIES, assert_same, perturbed, read_weights

from lit_grpo.policy import LoRA, Policy
from lit_grpo.policy.named_weights import named_weights


def saved(policy: Policy, directory: Path) -> dict[str, torch.Tensor]:
    """Return what ``save_pretrained`` of transformers writes after peft has merged the adapter."""
    model = copy.deepcopy(policy.model)
    merged = model if policy.lora is None else model.merge_and_unload()
    merged.save_pretrained(directory)
    return read_weights(directory)


@pytest.mark.parametrize("name", POLICIES)
def test_names_and_weights_are_those_of_the_written_policy(name, tmp_path):
    policy = perturbed(name)
    before = copy.deepcopy(policy.state_dict())
    weights = dict(named_weights(policy.model))
    assert_same(dict(policy.state_dict()), dict(before))
    torch.testing.assert_close(weights, saved(policy, tmp_path), rtol=0, atol=0)


def test_a_merged_weight_is_the_base_plus_the_scaled_product_of_the_factors():
    model = perturbed("llama with lora").model
    layer = model.get_base_model().model.layers[1].mlp.up_proj
    product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    torch.testing.assert_close(
        dict(named_weights(model))["model.layers.1.mlp.up_proj.weight"],
        (layer.base_layer.weight + 32 / 3 * product).detach(),
    )


def test_a_merged_weight_of_gpt2_takes_the_product_transposed():
    model = perturbed("gpt2 with lora").model
    layer = model.get_base_model().transformer.h[0].attn.c_attn
    product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    torch.testing.assert_close(
        dict(named_weights(model))["transformer.h.0.attn.c_attn.weight"],
        (layer.base_layer.weight + 32 / 3 * product.T).detach(),
    )


def test_weights_that_a_checkpoint_holds_fused_are_gathered_together_and_fused(tmp_path):
    settings = LLAMA | {"model_type": "hrm_text", "vocab_size": 64, "head_dim": 8}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    model.save_pretrained(tmp_path)
    written = read_weights(tmp_path)
    assert any("gqkv_proj" in name for name in written)
    assert_same(dict(named_weights(model)), written)


def test_names_that_need_the_whole_model_are_derived_from_it(tmp_path):
    model = tiny_policy().model
    # Each name on disk is the next one in memory, which shows only if the first one is there.
    model._weight_conversions = [
        GroupWeightRename(["mlp.a_proj", "mlp.down_proj"], ["mlp.down_proj", "mlp.gate_proj"])
    ]
    model.save_pretrained(tmp_path)
    written = read_weights(tmp_path)
    assert any("a_proj" in name for name in written)
    assert_same(dict(named_weights(model)), written)


def test_a_loaded_mixture_of_experts_is_named_as_on_its_disk(tmp_path):
    perturbed("mixtral").save_pretrained(tmp_path)
    policy = tiny_policy(architecture=None, path=str(tmp_path), lora=LoRA(rank=3))
    assert_same(dict(named_weights(policy.model)), read_weights(tmp_path))
