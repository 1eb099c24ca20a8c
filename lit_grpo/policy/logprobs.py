"""Logprobs and entropies of completion tokens; the only place where logits are shifted.

The head runs over a few tokens at a time and keeps no logits, neither in the forward nor in the
backward pass, so that no [N, C, V] tensor ever exists.
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
from lit_grpo.types import TokenBatch

CHUNK_LOGITS = 2**26
"""Logits that exist at the same time: a quarter of a GB, or 450 tokens at a vocabulary of
150,000."""

CACHED_LOGITS = 2**17
"""Logits that fit into the cache of a CPU: half a MB."""


class CausalModel(Protocol):
    """A language model whose body and head run separately, so that the head can run in chunks."""

    uses_packing: bool
    """Whether a batch runs as a pack rather than as padded rows."""
    is_compiled: bool
    """Whether the body runs through ``torch.compile``, so that all packs need the same layout."""
    vocab_size: int

    def hidden_states(self, ids: Tensor, mask: Tensor, position_ids: Tensor) -> Tensor:
        """Return [N, L, H] for padded rows [N, L]."""

    def packed_hidden_states(self, pack: Pack) -> Tensor:
        """Return [T, H] for the tokens of a pack."""

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Return [T, V] for [T, H]."""


class TokenStatistics(NamedTuple):
    """Values per completion token, 0 on padding."""

    logprobs: Tensor
    """[N, C] natural logarithms under the sampling temperature."""
    entropy: Tensor
    """[N, C] nats, of the distribution that the token was sampled from."""


def completion_statistics(
    model: CausalModel,
    batch: TokenBatch,
    *,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
    chunk_logits: int = CHUNK_LOGITS,
) -> TokenStatistics:
    """Return teacher-forced logprobs and entropies of a batch's completion tokens.

    Args:
        batch: On the CPU; the result is on the model's device.
        temperature: Divides the logits, as in sampling.
        entropy_gradient: Whether the entropy carries a gradient.
        chunk_logits: Maximum number of logits that exist at the same time.
    """
    get_states = packed_states if model.uses_packing else padded_states
    hidden_states, predictors = get_states(model, batch)
    device = hidden_states.device
    mask = batch.completion_mask.to(device, non_blocking=True)
    targets = batch.completion_ids[batch.completion_mask].to(device, non_blocking=True)
    statistics: Callable[..., tuple[Tensor, Tensor]] = partial(
        _chunk_statistics, model, temperature=temperature, entropy_gradient=entropy_gradient
    )
    size = max(1, chunk_logits // model.vocab_size)
    if len(targets) > size:  # with a single chunk, recomputing its logits would save no memory
        statistics = partial(checkpoint, statistics, use_reentrant=False, preserve_rng_state=False)
    parts = zip(torch.split(predictors, size), torch.split(targets, size), strict=True)
    chunks = [statistics(hidden_states, *part) for part in parts]
    empty = torch.zeros(mask.shape, dtype=torch.float32, device=device)
    return TokenStatistics(
        *(empty.masked_scatter(mask, torch.cat(parts)) for parts in zip(*chunks, strict=True))
    )


def packed_states(model: CausalModel, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Return [T, H] hidden states of a pack, and [M] which of them predicts each completion token.

    The indices are on the CPU.
    """
    packed = pack(batch, for_compile=model.is_compiled)
    return model.packed_hidden_states(packed), packed.predictors


def padded_states(model: CausalModel, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Return the same for padded rows, each with its prompt, for models that cannot run packs."""
    ids = torch.cat([batch.prompt_ids[batch.prompt_index], batch.completion_ids], 1)
    mask = torch.cat([batch.prompt_mask[batch.prompt_index], batch.completion_mask], 1)
    hidden_states = model.hidden_states(ids, mask, positions(mask))
    # The state at position t predicts token t + 1, so that of the last prompt token predicts the
    # first completion token.
    predicts = torch.zeros_like(mask)
    predicts[:, batch.prompt_ids.shape[1] - 1 : -1] = batch.completion_mask
    return hidden_states.flatten(0, 1), predicts.flatten().nonzero()[:, 0]


def _chunk_statistics(
    model: CausalModel,
    hidden_states: Tensor,
    predictors: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Return logprobs [M] and entropies [M] of [M] targets, in float32 for any dtype of the model.

    A hidden state that predicts several targets runs through the head once.
    """
    device = hidden_states.device
    indices = torch.unique(predictors, return_inverse=True)
    distinct, which = (index.to(device, non_blocking=True) for index in indices)
    logits = model.logits(hidden_states.index_select(0, distinct)).float()
    if temperature != 1:
        logits = logits / temperature
    log_probabilities = logits.log_softmax(-1)
    grad = entropy_gradient and torch.is_grad_enabled()
    with torch.set_grad_enabled(grad), torch.autocast(device.type, enabled=False):
        entropy = torch.cat([_entropy(rows) for rows in _split_for_cache(log_probabilities)])
    return log_probabilities[which, targets], entropy[which]


def _split_for_cache(logits: Tensor) -> tuple[Tensor, ...]:
    """Split rows on a CPU into parts that fit into its cache; do not split them on a GPU."""
    if logits.device.type != "cpu":
        return (logits,)
    return torch.split(logits, max(1, CACHED_LOGITS // logits.shape[1]))


def _entropy(log_probabilities: Tensor) -> Tensor:
    """Return [T] nats for [T, V]; a token of probability 0 adds nothing."""
    finite = log_probabilities.clamp(min=-1e30)
    negative: Tensor = torch.linalg.vecdot(log_probabilities.exp(), finite)
    return -negative
