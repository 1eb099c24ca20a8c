"""Rows that share the keys and values of their prompt, compared with rows that have copies."""

import pytest
import torch
from tiny import LLAMA, prompt, tiny_policy
from transformers import AttentionInterface

from lit_grpo.policy import LoRA
from lit_grpo.policy.body_and_head import evaluation_mode
from lit_grpo.rollout import HFEngine, Sampling
from lit_grpo.rollout.hf import engine as hf_engine
from lit_grpo.rollout.hf import shared_prompts
from lit_grpo.rollout.hf.running_batch import can_share_prompts
from lit_grpo.rollout.hf.shared_prompts import SHARED, SharedPrompts, shared_attention

PROMPTS = [prompt("12+34=", id="a"), prompt("a longer prompt", id="b"), prompt("x", id="c")]
WINDOWS = LLAMA | {"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 8}
HYBRID = LLAMA | {
    "model_type": "qwen3_next",
    "head_dim": 8,
    "num_hidden_layers": 4,
    "num_experts": 0,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


@pytest.fixture
def calls(monkeypatch):
    """Share prompts of any length; the layers in which the attention of this module ran."""
    called = []

    def attention(module, *args, **kwargs):
        called.append(module.layer_idx)
        return shared_attention(module, *args, **kwargs)

    monkeypatch.setattr(shared_prompts, "MIN_SAVED_TOKENS", 1)
    AttentionInterface.register(SHARED, attention)
    yield called
    AttentionInterface.register(SHARED, shared_attention)


def generate(policy, sampling, *, prompts=PROMPTS, group_size=4):
    engine = HFEngine()
    engine.load_weights(policy, version=0)
    rows = dict(engine.generate(prompts, group_size, sampling, seed=0))
    return [rows[n] for n in sorted(rows)]


def shares_prompts(policy) -> bool:
    with evaluation_mode(policy.model), torch.no_grad():
        return can_share_prompts(policy.model)


@pytest.mark.parametrize(
    "settings",
    [
        {"architecture": LLAMA},
        {"architecture": LLAMA | {"model_type": "qwen3", "head_dim": 8}},
        {"architecture": LLAMA | {"model_type": "granite", "attention_multiplier": 0.5}},
        {
            "architecture": {
                "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128,
            }
        },
        {"architecture": WINDOWS},
        {"architecture": HYBRID},
        {"architecture": LLAMA, "lora": LoRA(rank=4)},
    ],
    ids=["llama", "qwen3", "granite", "gpt2", "windows", "hybrid", "lora"],
)  # fmt: skip
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "unpadded"])
def test_rows_that_share_their_prompts_have_the_completions_of_rows_with_copies(
    settings, padded, calls, monkeypatch
):
    policy = tiny_policy(**settings)
    prompts = PROMPTS if padded else [prompt("12+3=", id="a"), prompt("77+8=", id="b")]
    stop = Sampling(max_tokens=24, stop_token_ids=tuple(range(40)))  # rows end at any time
    assert shares_prompts(policy)
    calls.clear()
    shared = generate(policy, stop, prompts=prompts)
    assert calls
    calls.clear()
    monkeypatch.setattr(hf_engine, "can_share_prompts", lambda model: False)
    copied = generate(policy, stop, prompts=prompts)
    assert not calls
    assert len({len(one.token_ids) for one in copied}) > 4
    for one, other in zip(shared, copied, strict=True):
        assert one.token_ids == other.token_ids
        assert one.sampler_logprobs == pytest.approx(other.sampler_logprobs, abs=1e-5)


def test_in_mixed_precision_the_completions_are_those_of_rows_with_copies_but_for_rounding(
    calls, monkeypatch
):
    policy = tiny_policy(architecture=LLAMA | {"model_type": "qwen3", "head_dim": 8})
    sampling = Sampling(max_tokens=4, min_tokens=4)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        assert shares_prompts(policy)
        calls.clear()
        shared = generate(policy, sampling)
        assert calls
        monkeypatch.setattr(hf_engine, "can_share_prompts", lambda model: False)
        copied = generate(policy, sampling)
    for one, other in zip(shared, copied, strict=True):
        if one.token_ids == other.token_ids:
            assert one.sampler_logprobs == pytest.approx(other.sampler_logprobs, abs=0.1)
    assert sum(a.token_ids == b.token_ids for a, b in zip(shared, copied, strict=True)) > 6


def test_short_prompts_are_copied_since_little_would_be_saved(calls, monkeypatch):
    policy = tiny_policy()
    tokens = 3 * 15 * (4 - 1)  # of three padded prompts, for the further rows of each group
    monkeypatch.setattr(shared_prompts, "MIN_SAVED_TOKENS", tokens + 1)
    generate(policy, Sampling(max_tokens=3))
    assert not calls
    assert shares_prompts(policy)
    calls.clear()
    monkeypatch.setattr(shared_prompts, "MIN_SAVED_TOKENS", tokens)
    generate(policy, Sampling(max_tokens=3))
    assert calls
    calls.clear()
    generate(policy, Sampling(max_tokens=3), group_size=1)
    assert not calls


class OtherKeys:
    """Attention that sees other keys than those that the model has cached."""

    def __init__(self, attention):
        self.attention = attention

    def __call__(self, module, query, key, *args, **kwargs):
        return self.attention(module, query, 2 * key, *args, **kwargs)


def refuse_arguments(*args, prompts=None, **kwargs):
    raise ValueError("unexpected argument prompts")


@pytest.mark.parametrize(
    "obstacle", ["other results", "another attention", "no arguments", "an error"]
)
def test_a_model_for_which_sharing_is_not_right_gets_copies(obstacle, calls, monkeypatch):
    policy = tiny_policy()
    if obstacle == "other results":
        AttentionInterface.register(SHARED, OtherKeys(shared_attention))
    elif obstacle == "another attention":
        policy.model.config._attn_implementation = "eager"
    elif obstacle == "an error":
        AttentionInterface.register(SHARED, refuse_arguments)
    else:
        forward = policy.model.model.forward
        monkeypatch.setattr(
            policy.model.model, "forward", lambda *a, prompts=None, **k: forward(*a, **k)
        )
    assert not shares_prompts(policy)
    before = generate(policy, Sampling(max_tokens=6))
    monkeypatch.setattr(hf_engine, "can_share_prompts", lambda model: False)
    assert generate(policy, Sampling(max_tokens=6)) == before


def test_prompts_that_no_row_continues_are_dropped_and_the_others_are_seen_by_their_rows():
    keys = torch.randn(3, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    values = keys.flip(2).clone()
    origin = torch.tensor([0, 0, 1, 1, 2, 2])
    mask = torch.tensor([[False, True, True, True, True], [True] * 5, [True] * 5])
    prompts = SharedPrompts(mask, origin)
    prompts.add(7, keys.clone(), values.clone())
    query = torch.randn(6, 2, 3, 8, generator=torch.Generator().manual_seed(1))
    for rows in ([0, 1, 2, 3, 4, 5], [5, 1, 2, 4], [2, 0, 3], [2]):
        origin, query = origin[rows], query[rows]
        prompts.keep(torch.tensor(rows))
        attended, log_sums = prompts.attend(7, query, None)
        scores = query @ keys[origin].transpose(2, 3) * 8**-0.5
        scores = scores.masked_fill(~mask[origin][:, None, None], -torch.inf)
        torch.testing.assert_close(attended, scores.softmax(-1) @ values[origin])
        torch.testing.assert_close(log_sums, scores.logsumexp(-1))
