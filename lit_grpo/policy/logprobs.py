"""The only place where logits are shifted and gathered.

The head runs over a few tokens at a time and forgets its logits at once, in forward and in
backward, so that no [N, C, V] tensor ever exists. Nothing here knows what a loss is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lit_grpo.policy.packing import Pack, pack
from lit_grpo.policy.padding import positions
from lit_grpo.types import TrainBatch

CHUNK_LOGITS = 2**26
"""Logits that exist at the same time, a quarter of a GB: those of 450 tokens at a vocabulary of
150,000."""

CACHED_LOGITS = 2**17
"""Logits that a CPU's cache holds: half a MB."""


class CausalModel(Protocol):
    """A language model in two halves, so that the head can run over chunks."""

    packs: bool
    """It runs a batch as a pack, not padded."""
    is_compiled: bool
    """It wants packs that are laid out alike."""
    vocab_size: int

    def hidden_states(self, ids: Tensor, mask: Tensor, position_ids: Tensor) -> Tensor:
        """[N, L] ids and mask to [N, L, H]."""

    def packed_hidden_states(self, pack: Pack) -> Tensor:
        """[T, H] of a pack's tokens."""

    def logits(self, hidden_states: Tensor) -> Tensor:
        """[T, H] to [T, V]."""


class TokenStatistics(NamedTuple):
    """Of every completion token, 0 on padding."""

    logprobs: Tensor
    """[N, C] natural logarithms under the sampling temperature."""
    entropy: Tensor
    """[N, C] nats of the distribution that the token was drawn from."""


def completion_statistics(
    model: CausalModel,
    batch: TrainBatch,
    *,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
    chunk_logits: int = CHUNK_LOGITS,
) -> TokenStatistics:
    """Teacher-forced logprobs and entropies of a batch's completion tokens.

    Args:
        batch: On any device; the statistics are where the model is.
        temperature: The logits are divided by it, as the sampler did.
        entropy_gradient: Let the entropy carry a gradient too.
    """
    hidden_states, predictors = (packed_states if model.packs else padded_states)(model, batch)
    mask = batch.completion_mask.to(hidden_states.device)
    targets = batch.completion_ids.to(hidden_states.device)[mask]
    statistics: Callable[..., tuple[Tensor, Tensor]] = partial(
        _chunk_statistics, model, temperature=temperature, entropy_gradient=entropy_gradient
    )
    size = max(1, chunk_logits // model.vocab_size)
    if len(targets) > size:  # else all logits exist when the backward pass begins anyway
        statistics = partial(checkpoint, statistics, use_reentrant=False, preserve_rng_state=False)
    chunks = [
        statistics(hidden_states, places, wanted)
        for places, wanted in zip(predictors.split(size), targets.split(size), strict=True)
    ]
    empty = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    return TokenStatistics(
        *(empty.masked_scatter(mask, torch.cat(parts)) for parts in zip(*chunks, strict=True))
    )


def packed_states(model: CausalModel, batch: TrainBatch) -> tuple[Tensor, Tensor]:
    """[T, H] hidden states, and on the CPU [M] which of them predicts each completion token."""
    packed = pack(batch, for_compile=model.is_compiled)
    return model.packed_hidden_states(packed), packed.predictors


def padded_states(model: CausalModel, batch: TrainBatch) -> tuple[Tensor, Tensor]:
    """The same, for models that can't run packs: each row with its prompt, padded."""
    ids = torch.cat([batch.prompt_ids[batch.prompt_index], batch.completion_ids], 1)
    mask = torch.cat([batch.prompt_mask[batch.prompt_index], batch.completion_mask], 1)
    hidden_states = model.hidden_states(ids, mask, positions(mask))
    # The hidden state one place to the left predicts a token: the last prompt token the first.
    predicts = torch.zeros_like(mask)
    predicts[:, batch.prompt_ids.shape[1] - 1 : -1] = batch.completion_mask
    return hidden_states.flatten(0, 1), predicts.flatten().nonzero()[:, 0].cpu()


def _chunk_statistics(
    model: CausalModel,
    hidden_states: Tensor,
    predictors: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Logprobs [M] and entropies [M] of [M] targets, in float32 whatever the model's dtype.

    A hidden state that predicts several targets goes through the head once.
    """
    device = hidden_states.device
    distinct, which = (index.to(device) for index in predictors.unique(return_inverse=True))
    logits = model.logits(hidden_states.index_select(0, distinct)).float()
    if temperature != 1:
        logits = logits / temperature
    log_probabilities = logits.log_softmax(-1)
    grad = entropy_gradient and torch.is_grad_enabled()
    with torch.set_grad_enabled(grad), torch.autocast(device.type, enabled=False):
        entropy = torch.cat([_entropy(rows) for rows in _cached_rows(log_probabilities)])
    return log_probabilities[which, targets], entropy[which]


def _cached_rows(logits: Tensor) -> tuple[Tensor, ...]:
    """On a CPU a few rows at a time, which stay in its cache; all elsewhere."""
    if logits.device.type != "cpu":
        return (logits,)
    return logits.split(max(1, CACHED_LOGITS // logits.shape[1]))


def _entropy(log_probabilities: Tensor) -> Tensor:
    """[T, V] to [T] nats; a token of probability 0 adds nothing."""
    return -torch.linalg.vecdot(log_probabilities.exp(), log_probabilities.clamp(min=-1e30))
