"""Adapters: which layers they can be added to, and the range of their settings."""

import pytest
from tiny import LLAMA, tiny_policy

from lit_grpo.policy import LoRA
from lit_grpo.types import UserError


@pytest.mark.parametrize("name", ["rank", "alpha"])
def test_a_rank_or_alpha_of_zero_is_refused(name):
    with pytest.raises(ValueError, match=rf"Set model\.policy\.lora\.{name}\."):
        LoRA(**{name: 0})


def test_one_name_as_a_text_is_refused_with_the_list_of_it():
    with pytest.raises(UserError, match=r"got 'q_proj' \(one name is \[q_proj\]\)"):
        LoRA(target_modules="q_proj")


def test_target_modules_that_the_model_does_not_have_are_refused():
    with pytest.raises(ValueError, match="Set model.policy.lora.target_modules"):
        tiny_policy(lora=LoRA(target_modules=["nowhere"]))


@pytest.mark.parametrize("key", ["target_modules", "modules_to_save"])
def test_a_typo_in_one_of_several_layers_is_refused(key):
    rule = (
        rf"lora\.{key} must name layers of LlamaForCausalLM, got 'v_prjo' .* mean v_proj\? .*"
        r"are down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj\.$"
    )
    with pytest.raises(ValueError, match=rule):
        tiny_policy(lora=LoRA(**{key: ["q_proj", "v_prjo"]}))


def test_an_adapter_on_a_tied_layer_is_refused():
    architecture = LLAMA | {"tie_word_embeddings": True}
    with pytest.raises(ValueError, match="lm_head: its weights are tied"):
        tiny_policy(architecture=architecture, lora=LoRA(target_modules=["q_proj", "lm_head"]))
    assert tiny_policy(architecture=architecture, lora=LoRA(target_modules=["q_proj"])).model
    assert tiny_policy(lora=LoRA(target_modules=["q_proj", "lm_head"])).model
