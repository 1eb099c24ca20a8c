import json

import pytest
from peft import LoraConfig
from tiny import LLAMA
from torch import nn

from lit_grpo.policy import LoRA, Policy
from lit_grpo.types import UserError


@pytest.mark.parametrize("settings", [{}, {"path": "a", "architecture": {"model_type": "llama"}}])
def test_a_policy_needs_either_a_path_or_an_architecture(settings):
    with pytest.raises(ValueError, match=r"either a path .* or an architecture"):
        Policy(**settings)


def test_a_model_is_no_path():
    with pytest.raises(ValueError, match=r"got a Linear .* Write the model with save_pretrained"):
        Policy(nn.Linear(2, 2))


def test_the_config_of_a_model_is_no_path():
    with pytest.raises(ValueError, match=r"got a dict with model_type.* write architecture="):
        Policy(LLAMA)


@pytest.mark.parametrize(
    ("given", "got", "arguments"),
    [
        ({"r": 8}, "a dict of peft's", "rank=8"),
        ({"rank": 4, "lora_alpha": 16}, "a dict of peft's", "rank=4, alpha=16"),
        (
            LoraConfig(r=8, target_modules=["v_proj", "q_proj"], lora_dropout=0.1),
            "a LoraConfig of peft",
            "rank=8, alpha=8, target_modules=['q_proj', 'v_proj']",
        ),
    ],
)
def test_the_settings_of_an_adapter_under_the_names_of_peft_are_translated(given, got, arguments):
    left_out = "" if isinstance(given, dict) else ", which has no lora_dropout"
    with pytest.raises(UserError) as raised:
        Policy("base", lora=given)
    assert str(raised.value) == (
        f"policy.lora must be of type LoRA or None, got {got} (write LoRA({arguments}), of "
        f"lit_grpo.policy{left_out}). Set model.policy.lora."
    )


def test_writing_the_adapter_alone_needs_an_adapter_and_a_full_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "base"}))
    settings = [
        {"architecture": LLAMA, "lora": LoRA()},
        {"path": "base"},
        {"path": str(tmp_path), "lora": LoRA()},
    ]
    for one in settings:
        with pytest.raises(ValueError, match="merge_lora: false writes only the adapter"):
            Policy(merge_lora=False, **one)
    assert not Policy("base", lora=LoRA(), merge_lora=False).merge_lora


@pytest.mark.parametrize("tags", [("<think>", "<think>"), ("<think>", "")])
def test_the_tags_of_reasoning_can_be_told_apart(tags):
    with pytest.raises(ValueError, match="reasoning_tags must be two different texts"):
        Policy("base", reasoning_tags=tags)
