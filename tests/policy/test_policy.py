"""The policy: its adapter, its reference, and what it writes."""

import pytest
import torch
from forked import run_in_processes
from live_bytes import LiveBytes
from tiny import LLAMA, perturbed, tiny_policy
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_grpo.policy import LoRA, Policy
from lit_grpo.types import UserError

IDS = torch.tensor([[1, 2, 3, 4]])


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def reference_logits(policy: Policy) -> torch.Tensor:
    mask = torch.ones_like(IDS, dtype=torch.bool)
    with torch.no_grad(), policy.reference() as reference:
        return reference.logits(reference.hidden_states(IDS, mask, torch.arange(4)[None]))


def test_a_saved_model_loads_in_transformers_and_as_a_policy(tmp_path):
    policy = tiny_policy()
    perturbed(policy)
    policy.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(loaded), logits(policy.model))
    assert AutoTokenizer.from_pretrained(tmp_path)("7+8=")["input_ids"] == list(
        policy.tokenizer("7+8=")["input_ids"]
    )
    torch.testing.assert_close(
        logits(tiny_policy(architecture=None, path=str(tmp_path)).model), logits(loaded)
    )


def test_a_policy_without_weights_cannot_be_saved(tmp_path):
    with pytest.raises(UserError, match="has no weights yet: a run loads them at its start"):
        Policy(architecture=LLAMA).save_pretrained(tmp_path)


def test_lora_trains_only_the_adapter_and_the_reference_is_the_base():
    policy = tiny_policy(lora=LoRA(rank=4), with_reference=True)
    base = logits(policy.model)
    assert all("lora" in name for name, p in policy.named_parameters() if p.requires_grad)
    perturbed(policy)
    assert (logits(policy.model) - base).abs().max() > 1e-3
    torch.testing.assert_close(reference_logits(policy), base)
    assert policy.reference_model is None


def test_saving_merges_the_adapter_and_leaves_the_policy_unchanged(tmp_path):
    policy = tiny_policy(lora=LoRA(rank=4))
    perturbed(policy)
    trained = logits(policy.model)
    policy.save_pretrained(tmp_path)
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path)), trained, atol=1e-5, rtol=1e-4
    )
    torch.testing.assert_close(logits(policy.model), trained)


def test_a_saved_adapter_loads_in_transformers_and_is_merged_to_start_from(tmp_path):
    base = tmp_path / "base"
    tiny_policy().save_pretrained(base)
    policy = tiny_policy(architecture=None, path=str(base), lora=LoRA(rank=4), merge_lora=False)
    perturbed(policy)
    policy.save_pretrained(tmp_path / "adapter")
    written = {file.name for file in (tmp_path / "adapter").iterdir()}
    assert "adapter_config.json" in written
    assert "model.safetensors" not in written
    modes = {file.stat().st_mode & 0o777 for file in (tmp_path / "adapter").iterdir()}
    assert len(modes) == 1, "a file is for its owner alone"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded), logits(policy.model))
    again = tiny_policy(
        architecture=None, path=str(tmp_path / "adapter"), lora=LoRA(rank=4), with_reference=True
    )
    torch.testing.assert_close(logits(again.model), logits(policy.model), atol=1e-5, rtol=1e-4)
    whole = tiny_policy(architecture=None, path=str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(whole.model), logits(policy.model), atol=1e-5, rtol=1e-4)
    assert len(whole.trainable_parameters()) == len(list(whole.model.parameters())) > 10


def test_an_adapter_names_its_base_by_a_path_that_holds_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_policy().save_pretrained("base")
    policy = tiny_policy(architecture=None, path="base", lora=LoRA(rank=4), merge_lora=False)
    policy.save_pretrained("adapter")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert tiny_policy(architecture=None, path="../adapter").model is not None
    (tmp_path / "base").rename(tmp_path / "moved")
    missing = rf"the adapter ../adapter needs the model .* {tmp_path}/base, and there is no such"
    with pytest.raises(UserError, match=missing):
        tiny_policy(architecture=None, path="../adapter")


def test_the_reference_of_full_training_is_a_frozen_copy():
    policy = tiny_policy(with_reference=True)
    before = logits(policy.model)
    perturbed(policy)
    torch.testing.assert_close(logits(policy.reference_model), before)
    assert not any(p.requires_grad for p in policy.reference_model.parameters())


def test_no_reference_is_loaded_unless_requested():
    assert tiny_policy().reference_model is None


def test_a_reference_is_not_made_of_a_policy_that_may_have_been_trained():
    policy = Policy(architecture=LLAMA)
    policy.load(with_reference=False)
    policy.load(with_reference=False)
    with pytest.raises(UserError, match="it has no reference, .* Make a new Policy"):
        policy.load(with_reference=True)


def test_a_reference_to_refresh_is_not_made_of_an_adapter_that_may_have_been_trained():
    policy = Policy(architecture=LLAMA, lora=LoRA(rank=2))
    policy.load(with_reference=True)
    policy.load(with_reference=True)
    with pytest.raises(UserError, match="so it has none to refresh, .* Make a new Policy"):
        policy.load(with_reference=True, refreshes_reference=True)


def test_gradient_checkpointing_does_not_change_the_gradient():
    gradients = []
    for checkpointing in (False, True):
        policy = tiny_policy(gradient_checkpointing=checkpointing)
        policy.train()
        policy.model(IDS).logits.logsumexp(-1).sum().backward()
        gradients.append([p.grad for p in policy.trainable_parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, checkpointed)


@pytest.mark.parametrize("lora", [None, LoRA(rank=4)])
def test_a_refreshed_reference_moves_to_the_policy_and_stays_there(lora):
    policy = Policy(architecture=LLAMA, lora=lora)
    policy.load(with_reference=True, refreshes_reference=True)
    initial = logits(policy.model)
    perturbed(policy)
    trained = logits(policy.model)
    torch.testing.assert_close(reference_logits(policy), initial)
    policy.refresh_reference(mix=1.0)
    torch.testing.assert_close(reference_logits(policy), trained)
    torch.testing.assert_close(logits(policy.model), trained)
    perturbed(policy)
    torch.testing.assert_close(reference_logits(policy), trained)


def test_a_reference_refreshed_in_part_is_a_moving_average():
    policy = tiny_policy(with_reference=True)
    initial = [parameter.clone() for parameter in policy.reference_model.parameters()]
    perturbed(policy)
    policy.refresh_reference(mix=0.25)
    pairs = zip(initial, policy.model.parameters(), strict=True)
    expected = [0.75 * start + 0.25 * current for start, current in pairs]
    for moved, wanted in zip(policy.reference_model.parameters(), expected, strict=True):
        torch.testing.assert_close(moved, wanted)


def peak_with_a_reference() -> tuple[int, int]:
    """Return the most bytes on a GPU while a policy and its reference go there, and of a model."""
    from pretend_device import DEVICE, PretendTensor, pretend_device

    with pretend_device():
        policy = Policy(architecture=LLAMA)
        with LiveBytes(lambda one: one.inner if isinstance(one, PretendTensor) else None) as live:
            policy.load(with_reference=True)
            policy.to(DEVICE)
        assert all(isinstance(one.data, PretendTensor) for one in policy.parameters())
    return live.peak, sum(one.nbytes for one in policy.model.parameters())


def test_a_reference_never_doubles_what_two_models_take_on_a_gpu():
    ((peak, of_a_model),) = run_in_processes(peak_with_a_reference)
    assert 2 * of_a_model <= peak < 2.1 * of_a_model


def test_a_model_in_place_of_its_path_is_told_to_be_saved():
    with pytest.raises(UserError, match=r"got a LlamaForCausalLM .* save_pretrained, and give its"):
        Policy(tiny_policy().model)
