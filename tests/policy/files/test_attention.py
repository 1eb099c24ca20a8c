import importlib.util

import pytest
from tiny import LLAMA

from lit_grpo import Policy
from lit_grpo.policy.files.attention import explained_attention
from lit_grpo.types import UserError

KEY = "model.policy.attn_implementation"
BLOOM = {"model_type": "bloom", "hidden_size": 32, "n_layer": 1, "n_head": 2}
without_flash = pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is not None, reason="flash-attn is installed"
)


def outlined(name: str, architecture: dict) -> str:
    with pytest.raises(UserError) as raised:
        Policy(architecture=architecture, attn_implementation=name).outline()
    return str(raised.value)


@without_flash
def test_a_missing_package_is_named_with_the_key():
    message = outlined("flash_attention_2", LLAMA)
    assert message.startswith(f"{KEY}: flash_attention_2 cannot be used: the package for Flash")
    assert message.endswith(
        f"installed. Install flash-attn, or set {KEY} to null, which lets transformers choose."
    )


def test_an_implementation_that_is_not_known_names_the_nearest():
    assert "no such implementation. Did you mean eager? Set" in outlined("eagr", LLAMA)
    assert "Known are eager, sdpa, flash_attention_2" in outlined("xyzzy", LLAMA)


def test_an_implementation_that_the_model_lacks_names_its_class():
    assert f"{KEY}: sdpa cannot be used: BloomForCausalLM does not support it. Set" in outlined(
        "sdpa", BLOOM
    )


@without_flash
def test_a_saved_model_is_told_of_the_implementation_and_not_of_its_path(tmp_path):
    policy = Policy(architecture=LLAMA)
    policy.load(with_reference=False)
    policy.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"^{KEY}: flash_attention_2 cannot be used"):
        Policy(str(tmp_path), attn_implementation="flash_attention_2").load(with_reference=False)


def test_other_errors_are_left_alone():
    with pytest.raises(ValueError, match="^heads$"), explained_attention("sdpa"):
        raise ValueError("heads")
    with pytest.raises(ImportError, match="flash"), explained_attention(None):
        raise ImportError("flash attention")
