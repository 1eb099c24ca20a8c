import pytest
import torch
from tiny import LLAMA, tiny_policy
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_grpo.policy import LoRA, Policy
from lit_grpo.policy.body_and_head import BodyAndHead, check_body_and_head
from lit_grpo.policy.byte_tokenizer import byte_tokenizer

IDS = torch.tensor([[1, 2, 3, 4]])


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def stir(policy: Policy) -> None:
    """Move every trainable weight, so that a forgotten one would show."""
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter += 0.05 * torch.randn_like(parameter)


def test_the_byte_tokenizer_decodes_what_it_encodes():
    tokenizer = byte_tokenizer()
    text = "12+34=46\n naïve  \t🙂 <b>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) == 258
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.decode(ids) == "user: hi\nassistant: "


def test_a_written_model_loads_in_transformers_and_as_a_policy(tmp_path):
    policy = tiny_policy()
    stir(policy)
    policy.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(loaded), logits(policy.model))
    assert AutoTokenizer.from_pretrained(tmp_path)("7+8=")["input_ids"] == list(
        policy.tokenizer("7+8=")["input_ids"]
    )
    torch.testing.assert_close(
        logits(tiny_policy(architecture=None, path=str(tmp_path)).model), logits(loaded)
    )


def test_lora_trains_the_adapter_only_and_its_reference_is_the_base():
    policy = tiny_policy(lora=LoRA(rank=4), with_reference=True)
    base = logits(policy.model)
    assert all("lora" in name for name, p in policy.named_parameters() if p.requires_grad)
    stir(policy)
    assert (logits(policy.model) - base).abs().max() > 1e-3
    mask = torch.ones_like(IDS, dtype=torch.bool)
    with torch.no_grad(), policy.reference() as reference:
        hidden = reference.hidden_states(IDS, mask, torch.arange(4)[None])
        torch.testing.assert_close(reference.logits(hidden), base)
    assert policy.reference_model is None


def test_a_merged_adapter_is_the_policy_and_training_goes_on(tmp_path):
    policy = tiny_policy(lora=LoRA(rank=4))
    stir(policy)
    trained = logits(policy.model)
    policy.save_pretrained(tmp_path)
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path)), trained, atol=1e-5, rtol=1e-4
    )
    torch.testing.assert_close(logits(policy.model), trained)


def test_a_kept_adapter_loads_in_transformers_and_is_merged_as_a_start(tmp_path):
    base = tmp_path / "base"
    tiny_policy().save_pretrained(base)
    policy = tiny_policy(architecture=None, path=str(base), lora=LoRA(rank=4), merge_lora=False)
    stir(policy)
    policy.save_pretrained(tmp_path / "adapter")
    written = {file.name for file in (tmp_path / "adapter").iterdir()}
    assert "adapter_config.json" in written
    assert "model.safetensors" not in written
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded), logits(policy.model))
    again = tiny_policy(
        architecture=None, path=str(tmp_path / "adapter"), lora=LoRA(rank=4), with_reference=True
    )
    torch.testing.assert_close(logits(again.model), logits(policy.model), atol=1e-5, rtol=1e-4)


def test_a_frozen_copy_is_the_reference_of_full_training():
    policy = tiny_policy(with_reference=True)
    before = logits(policy.model)
    stir(policy)
    torch.testing.assert_close(logits(policy.reference_model), before)
    assert not any(p.requires_grad for p in policy.reference_model.parameters())


def test_without_a_kl_term_no_reference_is_loaded():
    assert tiny_policy().reference_model is None


def test_dropout_is_off_in_training_mode():
    policy = tiny_policy(architecture=LLAMA | {"attention_dropout": 0.5})
    policy.train()
    torch.testing.assert_close(logits(policy.model), logits(policy.model), rtol=0, atol=0)
    gpt2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    policy = tiny_policy(architecture=gpt2)
    policy.train()
    torch.testing.assert_close(logits(policy.model), logits(policy.model), rtol=0, atol=0)


def test_gradient_checkpointing_leaves_the_gradient_the_same():
    gradients = []
    for checkpointing in (False, True):
        policy = tiny_policy(gradient_checkpointing=checkpointing)
        policy.train()
        policy.model(IDS).logits.logsumexp(-1).sum().backward()
        gradients.append([p.grad for p in policy.trainable_parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, checkpointed)


def test_dtype_and_attention_reach_the_model():
    policy = tiny_policy(dtype="bfloat16", attn_implementation="eager")
    assert next(policy.model.parameters()).dtype is torch.bfloat16
    assert policy.model.config._attn_implementation == "eager"


def test_a_model_whose_head_is_more_than_a_scale_is_refused():
    model = tiny_policy().model
    plain_forward = model.forward

    def shifted(*args, **kwargs):
        output = plain_forward(*args, **kwargs)
        output.logits = output.logits + torch.arange(output.logits.shape[-1])
        return output

    model.forward = shifted
    with pytest.raises(ValueError, match="BodyAndHead"):
        check_body_and_head(model)


def test_soft_capped_and_scaled_logits_are_those_of_the_model():
    for extra in (
        {"model_type": "gemma2", "head_dim": 8, "final_logit_softcapping": 0.5},
        {"model_type": "cohere", "logit_scale": 0.3},
    ):
        policy = tiny_policy(architecture=LLAMA | extra)
        halves = BodyAndHead(policy.model)
        mask = torch.ones_like(IDS, dtype=torch.bool)
        hidden = halves.hidden_states(IDS, mask, torch.arange(4)[None])
        torch.testing.assert_close(halves.logits(hidden), policy.model(IDS).logits)


@pytest.mark.parametrize("settings", [{}, {"path": "a", "architecture": {"model_type": "llama"}}])
def test_a_policy_needs_exactly_one_start(settings):
    with pytest.raises(ValueError, match="either a path .* or an architecture"):
        Policy(**settings)


def test_the_adapter_alone_needs_a_base_to_stand_on():
    with pytest.raises(ValueError, match="merge_lora"):
        Policy(architecture=LLAMA, lora=LoRA(), merge_lora=False)


def test_a_path_without_a_model_is_said_in_one_error(tmp_path):
    with pytest.raises(ValueError, match="Set model.policy.path"):
        Policy(path=str(tmp_path)).load(with_reference=False)


@pytest.mark.parametrize("path", ["runs/nowhere/0/final", "./nowhere", "/no/where"])
def test_a_path_that_is_not_there_is_not_asked_of_the_hub(path):
    policy = Policy(path=path)
    with pytest.raises(ValueError, match="there is no such directory"):
        policy.load(with_reference=False)
    with pytest.raises(ValueError, match="no tokenizer could be loaded"):
        policy.tokenizer  # noqa: B018 - the property loads


def test_an_unknown_architecture_is_said_in_one_error():
    with pytest.raises(
        ValueError, match="Set\nmodel.policy.architecture|Set model.policy.architecture"
    ):
        Policy(architecture={"model_type": "lama"}).load(with_reference=False)


def test_modules_that_no_adapter_fits_are_said_in_one_error():
    with pytest.raises(ValueError, match="Set model.policy.lora.target_modules"):
        tiny_policy(lora=LoRA(target_modules=["nowhere"]))


def test_an_adapter_on_a_tied_layer_is_refused_since_merging_would_change_its_twin():
    architecture = LLAMA | {"tie_word_embeddings": True}
    with pytest.raises(ValueError, match="lm_head: its weights are tied"):
        tiny_policy(architecture=architecture, lora=LoRA(target_modules=["q_proj", "lm_head"]))
    assert tiny_policy(architecture=architecture, lora=LoRA(target_modules=["q_proj"])).model
    assert tiny_policy(lora=LoRA(target_modules=["q_proj", "lm_head"])).model
