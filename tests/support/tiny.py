"""Tiny real models and hand-made rollouts for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lit_grpo.policy import Policy
from lit_grpo.training.batching import collate_rollouts, to_train_batch, trained_rows
from lit_grpo.types import Completion, Group, Outcome, Prompt, RolloutBatch, Score, TrainBatch

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
}


def tiny_policy(*, with_reference: bool = False, seed: int = 0, **settings) -> Policy:
    """Load a policy with random weights and a byte tokenizer."""
    torch.manual_seed(seed)
    policy = Policy(**({"architecture": LLAMA} | settings))
    policy.load(with_reference=with_reference)
    return policy


def perturbed(policy: Policy, *, seed: int = 5) -> Policy:
    """Change every trainable weight, so that a missing one is noticed; return the policy."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return policy


def prompt(text: str = "1+1=", *, id: str = "p", answer: str | None = "2", **columns) -> Prompt:
    return Prompt(id=id, text=text, token_ids=tuple(text.encode()), answer=answer, columns=columns)


def completion(
    token_ids: Sequence[int] = (5, 6),
    *,
    text: str = "",
    logprobs: Sequence[float] | None = None,
    finish_reason: str = "stop",
) -> Completion:
    return Completion(
        token_ids=tuple(token_ids),
        sampler_logprobs=tuple(logprobs or [-1.0] * len(token_ids)),
        text=text,
        finish_reason=finish_reason,
    )


def rollouts(
    rewards: Sequence[Sequence[float | Score | None]],
    completions: Sequence[Sequence[Completion]] | None = None,
    parts: Mapping[str, Sequence[Sequence[float | Score | None]]] | None = None,
) -> RolloutBatch:
    """Build a batch with these rewards [B, G]; None is a row that could not be scored."""
    values = as_tensor(rewards)
    named = {"task": rewards} if parts is None else parts
    groups = tuple(
        Group(
            prompt=prompt(id=f"p{i}"),
            completions=tuple(completions[i] if completions else [completion() for _ in row]),
            scores={name: tuple(map(score, part[i])) for name, part in named.items()},
        )
        for i, row in enumerate(rewards)
    )
    return RolloutBatch(
        groups=groups,
        rewards=values,
        parts={name: as_tensor(part) for name, part in named.items()},
        valid=~values.isnan(),
    )


def score(value: float | Score | None) -> Score:
    if isinstance(value, Score):
        return value
    return Score(value=value, outcome=Outcome.ERROR if value is None else Outcome.OK)


def as_tensor(values: Sequence[Sequence[float | Score | None]]) -> torch.Tensor:
    found = [[score(one).value for one in row] for row in values]
    filled = [[float("nan") if one is None else one for one in row] for row in found]
    return torch.tensor(filled, dtype=torch.float64)


def unbatched_logprobs(
    model, batch, row: int, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute logprobs and entropies of one row of a train batch with the whole model.

    The row is alone in its batch, without padding, cache or chunks.
    """
    index = batch.prompt_index[row]
    prompt = batch.prompt_ids[index][batch.prompt_mask[index]]
    completion = batch.completion_ids[row][batch.completion_mask[row]]
    logits = model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
    full = (logits / temperature).log_softmax(-1)
    return full.gather(1, completion[:, None])[:, 0], -(full.exp() * full).sum(1)


def train_batch(batch: RolloutBatch, *, overlong_filtering: bool = False) -> TrainBatch:
    """Turn rollouts into tensors, with an advantage of 1 on every row."""
    trained = trained_rows(batch, overlong_filtering=overlong_filtering)
    tokens = collate_rollouts(batch, pad_id=0)
    return to_train_batch(tokens, batch, trained=trained, advantages=torch.ones(len(trained)))
