"""Packed and padded logprobs and gradients of many architectures, also under torch.compile."""

import functools
import logging

import pytest
import torch
from rows_alone import (
    ARCHITECTURES,
    EXPERTS,
    GPT2,
    HEADS,
    assert_same_as_alone,
    gradients,
    some_batch,
)
from tiny import LLAMA, tiny_policy, unbatched_logprobs
from transformers import AutoConfig, AutoModelForCausalLM

from lit_grpo.policy import LoRA
from lit_grpo.policy.body_and_head import (
    BodyAndHead,
    check_body_and_head,
    num_compilations,
    structural_obstacle,
)
from lit_grpo.policy.logprobs import completion_statistics, packed_states
from lit_grpo.policy.padding import pad
from lit_grpo.types import UserError


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_pack_gives_the_logprobs_and_gradients_of_each_row_alone(name):
    policy = tiny_policy(architecture=ARCHITECTURES[name])
    assert policy.body_and_head.uses_packing
    for seed in range(3):
        assert_same_as_alone(policy, some_batch(seed))


def test_in_double_precision_a_pack_differs_by_rounding_errors_only():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(vocab_size=16, **GPT2)).double()
    batch = some_batch()
    hidden_states, predictors = packed_states(BodyAndHead(model.eval(), use_packing=True), batch)
    logits = model.lm_head(hidden_states[predictors])
    targets = batch.completion_ids[batch.completion_mask]
    ours = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    theirs = torch.cat([unbatched_logprobs(model, batch, row)[0] for row in range(batch.num_rows)])
    assert (ours - theirs).abs().max() < 1e-10


@pytest.mark.parametrize(
    "settings",
    [
        {"attn_implementation": "eager"},
        {"gradient_checkpointing": True},
        {"lora": LoRA(rank=4)},
        {"lora": LoRA(rank=4), "gradient_checkpointing": True},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_packing_works_with_every_setting_of_the_policy(settings):
    policy = tiny_policy(**settings)
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    assert_same_as_alone(policy, some_batch(1))


@pytest.mark.parametrize("autocast", [False, True])
def test_a_pack_in_bfloat16_is_as_close_as_bfloat16_allows(autocast):
    policy = tiny_policy(dtype="float32" if autocast else "bfloat16")
    assert policy.body_and_head.uses_packing
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert_same_as_alone(policy, some_batch(), tolerance=0.05)


def test_the_reference_runs_packs():
    for settings in ({}, {"lora": LoRA(rank=4)}):
        policy = tiny_policy(with_reference=True, **settings)
        batch = some_batch()
        with torch.no_grad(), policy.reference() as reference:
            assert reference.uses_packing
            logprobs, _ = completion_statistics(reference, batch)
            start = torch.cat(
                [unbatched_logprobs(policy.model, batch, row)[0] for row in range(batch.num_rows)]
            )
        torch.testing.assert_close(logprobs[batch.completion_mask], start, rtol=0, atol=1e-5)


def test_generating_between_the_forward_and_backward_pass_of_a_pack_changes_nothing():
    results = []
    for meanwhile in (False, True):
        policy = tiny_policy(gradient_checkpointing=True)
        ids, mask = pad([[1, 2, 3], [4, 5]], 0, torch.long, left=True)
        generate = functools.partial(
            policy.model.eval().generate, ids, attention_mask=mask.long(), max_new_tokens=6,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
        before = generate()
        policy.model.train()
        logprobs, _ = completion_statistics(policy.body_and_head, some_batch())
        if meanwhile:
            policy.model.eval()
            assert torch.equal(generate(), before)
            policy.model.train()
        results.append(gradients(policy, logprobs, some_batch()))
        assert policy.model.config._attn_implementation == "sdpa"
    for plain, other in zip(*results, strict=True):
        torch.testing.assert_close(plain, other, rtol=0, atol=0)


STATE_SPACE = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
OBSTACLES = {
    "linear_attention layers": STATE_SPACE,
    "chunked_attention layers": HEADS
    | EXPERTS
    | {"model_type": "llama4_text", "num_local_experts": 2, "interleave_moe_layer_step": 2},
    "cannot be chosen through transformers": {
        "model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4
    },
    "uses s_aux": HEADS | {"model_type": "gpt_oss", "num_local_experts": 2,
                           "num_experts_per_tok": 1, "layer_types": ["full_attention"] * 2},
    "pass no further arguments": LLAMA | {"model_type": "stablelm"},
}  # fmt: skip


@pytest.mark.parametrize("reason", OBSTACLES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_cannot_run_packs_is_detected_with_the_reason(reason, dtype):
    config = AutoConfig.for_model(vocab_size=16, **OBSTACLES[reason])
    assert reason in structural_obstacle(AutoModelForCausalLM.from_config(config, dtype=dtype))


def test_a_failure_that_says_nothing_about_packs_is_not_swallowed(monkeypatch):
    def fail(self, pack):
        raise RuntimeError("Expected all tensors to be on the same device")

    monkeypatch.setattr(BodyAndHead, "packed_hidden_states", fail)
    with pytest.raises(UserError, match="on the same device.*set model.policy.packing to false"):
        tiny_policy()
    assert not tiny_policy(packing=False).body_and_head.uses_packing


def test_a_model_that_cannot_run_packs_runs_padded_with_a_warning(caplog):
    architecture = OBSTACLES["cannot be chosen through transformers"]
    with caplog.at_level(logging.WARNING, "lit_grpo"):
        policy = tiny_policy(architecture=architecture)
    (record,) = [
        record for record in caplog.records if record.name == "lit_grpo.policy.body_and_head"
    ]
    assert "BloomForCausalLM" in record.getMessage()
    assert "attention" in record.getMessage()
    assert not policy.body_and_head.uses_packing
    assert_same_as_alone(policy, some_batch())


def test_a_compiled_body_runs_packs_of_fixed_layout(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda body, dynamic: compiled.append(body) or body)
    policy = tiny_policy(compile=True)
    assert policy.body_and_head.is_compiled
    assert len(compiled) == 1
    for seed in range(3):
        assert_same_as_alone(policy, some_batch(seed))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "gradient_checkpointing"), [("eager", False), ("aot_eager", True)]
)
def test_batches_of_all_shapes_are_compiled_once(monkeypatch, backend, gradient_checkpointing):
    """Use fast backends: whether to compile again is decided before code is generated."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    policy = tiny_policy(
        architecture=LLAMA | {"num_hidden_layers": 1},
        compile=True,
        gradient_checkpointing=gradient_checkpointing,
    )
    counts = [num_compilations()]
    for seed in range(6):
        assert_same_as_alone(policy, some_batch(seed))
        with torch.no_grad():
            completion_statistics(policy.body_and_head, some_batch(seed))
        counts.append(num_compilations())
    assert counts[1] > counts[0]
    assert counts[2:] == counts[2:3] * 5


def test_a_model_that_does_more_than_scale_and_cap_its_logits_is_refused():
    model = tiny_policy().model
    plain_forward = model.forward

    def shifted(*args, **kwargs):
        output = plain_forward(*args, **kwargs)
        output.logits = output.logits + torch.arange(output.logits.shape[-1])
        return output

    model.forward = shifted
    with pytest.raises(ValueError, match="BodyAndHead"):
        check_body_and_head(model)


def test_scaled_and_soft_capped_logits_are_those_of_the_model():
    ids = torch.tensor([[1, 2, 3, 4]])
    for extra in (
        {"model_type": "gemma2", "head_dim": 8, "final_logit_softcapping": 0.5},
        {"model_type": "cohere", "logit_scale": 0.3},
    ):
        policy = tiny_policy(architecture=LLAMA | extra)
        body_and_head = BodyAndHead(policy.model)
        mask = torch.ones_like(ids, dtype=torch.bool)
        hidden = body_and_head.hidden_states(ids, mask, torch.arange(4)[None])
        torch.testing.assert_close(body_and_head.logits(hidden), policy.model(ids).logits)
