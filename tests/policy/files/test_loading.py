"""Loading and building models: settings that reach the model, and errors that name the fix."""

import pytest
import torch
from tiny import LLAMA, tiny_policy
from transformers import GenerationConfig

from lit_grpo.policy import Policy
from lit_grpo.policy.byte_tokenizer import byte_tokenizer
from lit_grpo.types import UserError

IDS = torch.tensor([[1, 2, 3, 4]])


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def test_dropout_is_off_in_training_mode():
    policy = tiny_policy(architecture=LLAMA | {"attention_dropout": 0.5})
    policy.train()
    torch.testing.assert_close(logits(policy.model), logits(policy.model), rtol=0, atol=0)
    gpt2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    policy = tiny_policy(architecture=gpt2)
    policy.train()
    torch.testing.assert_close(logits(policy.model), logits(policy.model), rtol=0, atol=0)


def test_dtype_and_attention_implementation_are_those_of_the_model():
    policy = tiny_policy(dtype="bfloat16", attn_implementation="eager")
    assert next(policy.model.parameters()).dtype is torch.bfloat16
    assert policy.model.config._attn_implementation == "eager"


def test_an_architecture_whose_sizes_do_not_fit_is_refused_with_the_reason():
    with pytest.raises(
        ValueError, match=r"hidden size \(33\) is not a multiple .* Set model.policy"
    ):
        Policy(architecture=LLAMA | {"hidden_size": 33}).load(with_reference=False)


def test_an_unknown_architecture_is_refused():
    with pytest.raises(ValueError, match="Set model.policy.architecture"):
        Policy(architecture={"model_type": "lama"}).load(with_reference=False)


def test_a_mistyped_field_of_an_architecture_is_refused_with_the_one_that_was_meant():
    what = (
        r"architecture\.num_hiden_layers: LlamaConfig has no such field. Did you mean num_hidden_"
    )
    with pytest.raises(UserError, match=what):
        tiny_policy(architecture=LLAMA | {"num_hiden_layers": 1})


def test_a_field_that_such_models_do_not_have_is_warned_of(caplog):
    tiny_policy(architecture=LLAMA | {"rope_theta": 5e5, "attention_bias": True})
    assert "no such field" not in caplog.text
    tiny_policy(architecture=LLAMA | {"window": 3})
    assert "architecture.window: LlamaConfig has no such field, so it may change" in caplog.text


def test_a_tokenizer_without_a_padding_token_pads_with_its_end_of_sequence_token(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert Policy(str(tmp_path)).tokenizer.pad_token_id == tokenizer.eos_token_id == 256


@pytest.mark.parametrize("settings", [{"path": "own"}, {"architecture": LLAMA, "tokenizer": "own"}])
def test_a_tokenizer_with_neither_is_refused_with_what_to_set(settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token = None
    tokenizer.save_pretrained("own")
    expected = (
        "the tokenizer of 'own' must have an end-of-sequence token, got one with neither that nor "
        r"a padding token \(a completion could never end.* set tokenizer.eos_token to the token"
    )
    with pytest.raises(UserError, match=expected):
        Policy(**settings).tokenizer  # noqa: B018 - the property loads


def test_an_outline_has_the_ends_of_the_model(tmp_path):
    tiny_policy().save_pretrained(tmp_path)
    generation = GenerationConfig.from_pretrained(tmp_path)
    generation.eos_token_id = [7, 256]
    generation.save_pretrained(tmp_path)
    assert Policy(str(tmp_path)).outline().generation_config.eos_token_id == [7, 256]
