"""Adapters: which layers they can be added to, and the range of their settings."""

import pytest
from tiny import LLAMA, tiny_policy

from lit_grpo.policy import LoRA


@pytest.mark.parametrize("name", ["rank", "alpha"])
def test_a_rank_or_alpha_of_zero_is_refused(name):
    with pytest.raises(ValueError, match=rf"Set model\.policy\.lora\.{name}\."):
        LoRA(**{name: 0})


def test_target_modules_that_the_model_does_not_have_are_refused():
    with pytest.raises(ValueError, match="Set model.policy.lora.target_modules"):
        tiny_policy(lora=LoRA(target_modules=["nowhere"]))


def test_an_adapter_on_a_tied_layer_is_refused():
    architecture = LLAMA | {"tie_word_embeddings": True}
    with pytest.raises(ValueError, match="lm_head: its weights are tied"):
        tiny_policy(architecture=architecture, lora=LoRA(target_modules=["q_proj", "lm_head"]))
    assert tiny_policy(architecture=architecture, lora=LoRA(target_modules=["q_proj"])).model
    assert tiny_policy(lora=LoRA(target_modules=["q_proj", "lm_head"])).model
