"""Small models of many architectures, and what each row of a batch gives alone in its batch."""

from __future__ import annotations

import random

import torch
from packed_batches import batch_of, random_groups
from tiny import LLAMA, unbatched_logprobs

from lit_grpo.policy.logprobs import completion_statistics

HEADS = LLAMA | {"head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128,
        "initializer_range": 0.1}  # fmt: skip
ARCHITECTURES = {
    "llama": HEADS,
    "gpt2": GPT2,
    "qwen2": HEADS | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5,
                      "max_window_layers": 1},
    "qwen3": HEADS | {"model_type": "qwen3"},
    "qwen2_moe": HEADS | EXPERTS | {"model_type": "qwen2_moe", "use_sliding_window": True,
                                    "sliding_window": 5, "max_window_layers": 1},
    "gemma2": HEADS | {"model_type": "gemma2", "sliding_window": 5,
                       "attn_logit_softcapping": 0.7, "query_pre_attn_scalar": 4},
    "gemma3": HEADS | {"model_type": "gemma3_text", "sliding_window": 5,
                       "layer_types": ["sliding_attention", "full_attention"]},
    "granite": HEADS | {"model_type": "granite", "attention_multiplier": 0.3,
                        "logits_scaling": 3.0},
    "mistral": HEADS | {"model_type": "mistral", "sliding_window": 5},
    "cohere": HEADS | {"model_type": "cohere", "logit_scale": 0.3},
}  # fmt: skip


def some_batch(seed: int = 0):
    return batch_of(*random_groups(random.Random(seed), longest=24, vocabulary=5))


def gradients(policy, logprobs, batch) -> list[torch.Tensor]:
    """Return the gradients of a loss that weighs every row differently."""
    loss = sum(row.sum() * weight for row, weight in zip(logprobs, batch.advantages, strict=True))
    policy.zero_grad()
    loss.backward()
    return [parameter.grad.clone() for parameter in policy.trainable_parameters()]


def assert_same_as_alone(policy, batch, tolerance: float = 1e-5) -> None:
    """Compare logprobs, entropies and gradients of a batch with those of each row alone."""
    ours = completion_statistics(policy.body_and_head, batch)
    rows = [unbatched_logprobs(policy.model, batch, row) for row in range(batch.num_rows)]
    expected = [torch.cat(column) for column in zip(*rows, strict=True)]
    for got, plain in zip(ours, expected, strict=True):
        torch.testing.assert_close(
            got[batch.completion_mask], plain.float(), rtol=tolerance, atol=tolerance
        )
    theirs = gradients(policy, [logprobs for logprobs, _ in rows], batch)
    for got, plain in zip(gradients(policy, ours.logprobs, batch), theirs, strict=True):
        assert (got - plain).norm() <= tolerance * plain.norm() + 1e-9
