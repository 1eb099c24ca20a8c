"""The only place where logits are shifted and gathered.

The head runs over a few tokens at a time and forgets its logits at once, in forward and in
backward, so that no [N, C, V] tensor ever exists. Nothing here knows what a loss is.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lit_grpo.types import TrainBatch

CHUNK_TOKENS = 1024
"""Tokens whose logits exist at the same time: 1024 at a vocabulary of 150,000 take 0.6 GB."""


class CausalModel(Protocol):
    """A language model in two halves, so that the head can run over chunks."""

    def hidden_states(self, ids: Tensor, mask: Tensor, position_ids: Tensor) -> Tensor:
        """[N, L] ids and mask to [N, L, H]."""

    def logits(self, hidden_states: Tensor) -> Tensor:
        """[T, H] to [T, V]."""


class TokenStatistics(NamedTuple):
    """Of every completion token, 0 on padding."""

    logprobs: Tensor
    """[N, C] natural logarithms under the sampling temperature."""
    entropy: Tensor
    """[N, C] nats of the distribution that the token was drawn from."""


def positions(mask: Tensor) -> Tensor:
    """[N, L] position of every token among its row's real tokens."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)


def completion_statistics(
    model: CausalModel,
    batch: TrainBatch,
    *,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
    chunk_tokens: int = CHUNK_TOKENS,
) -> TokenStatistics:
    """Teacher-forced logprobs and entropies of a batch's completion tokens.

    Args:
        temperature: The logits are divided by it, as the sampler did.
        entropy_gradient: Let the entropy carry a gradient too.
    """
    ids = torch.cat([batch.prompt_ids[batch.prompt_index], batch.completion_ids], 1)
    mask = torch.cat([batch.prompt_mask[batch.prompt_index], batch.completion_mask], 1)
    hidden_states = model.hidden_states(ids, mask, positions(mask))
    # The hidden state one place to the left predicts a token: the last prompt token the first.
    before = hidden_states[:, batch.prompt_ids.shape[1] - 1 : -1]
    predictors = before[batch.completion_mask]
    targets = batch.completion_ids[batch.completion_mask]
    chunks = [
        checkpoint(
            _chunk_statistics,
            model,
            predictors[start : start + chunk_tokens],
            targets[start : start + chunk_tokens],
            temperature,
            entropy_gradient,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for start in range(0, max(1, len(targets)), chunk_tokens)
    ]
    logprobs, entropy = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    empty = torch.zeros(batch.completion_mask.shape, dtype=torch.float32, device=ids.device)
    return TokenStatistics(
        empty.masked_scatter(batch.completion_mask, logprobs),
        empty.masked_scatter(batch.completion_mask, entropy),
    )


def _chunk_statistics(
    model: CausalModel,
    hidden_states: Tensor,
    targets: Tensor,
    temperature: float,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """[T, H] and [T] to logprobs [T] and entropies [T], in float32 whatever the model's dtype."""
    logits = model.logits(hidden_states).float() / temperature
    log_normaliser = logits.logsumexp(-1)
    logprobs = logits.gather(-1, targets[:, None])[:, 0] - log_normaliser
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        probabilities = (logits - log_normaliser[:, None]).exp()
        # A logit of -inf has probability 0 and adds nothing.
        entropy = log_normaliser - (probabilities * logits.clamp(min=-1e30)).sum(-1)
    return logprobs, entropy
