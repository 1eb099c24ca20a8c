"""Logprobs and entropies of completion tokens; the only place where logits are shifted.

The head runs over a few tokens at a time and keeps no logits, neither in the forward nor in the
backward pass, so no [N, C, V] tensor ever exists. The way down, from a batch to logits:

- `completion_statistics`, `candidate_statistics` and `top_tokens` say what is computed of a chunk
  (`_chunk_statistics`, `_chunk_top`), and pass it to `_in_chunks`;
- `_run_in_chunks`, within ``model.run``, gets hidden states of all tokens: the body's forward pass;
- `_run_head`, within ``model.with_head``, calls the function of a chunk for one chunk at a time;
- the function of a chunk gets its logits from `_distinct_logits`: the head's forward pass.

``model`` is a `BodyAndHead`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lit_grpo.policy.chosen_logprobs import chosen_logprobs
from lit_grpo.policy.packed.packing import Pack, pack
from lit_grpo.policy.padding import positions
from lit_grpo.policy.sharding import T
from lit_grpo.types import TokenBatch

CHUNK_LOGITS = 2**26
"""Logits that exist at the same time: a quarter of a GB, or 450 tokens at a vocabulary of
150,000."""


class CausalModel(Protocol):
    """A language model whose body and head run separately, so that the head can run in chunks."""

    uses_packing: bool
    """Whether a batch runs as a pack rather than as padded rows."""
    is_sharded: bool
    """Whether a forward pass is collective: then every rank must make equally many."""
    is_compiled: bool
    """Whether the body runs through ``torch.compile``: then all packs need the same layout."""
    vocab_size: int

    def run(self, function: Callable[[], T]) -> T:
        """Call a function that uses the methods below; under a sharded strategy on every rank."""

    def hidden_states(self, ids: Tensor, mask: Tensor, position_ids: Tensor) -> Tensor:
        """Return [N, L, H] for padded rows [N, L]."""

    def packed_hidden_states(self, pack: Pack) -> Tensor:
        """Return [T, H] for the tokens of a pack."""

    def with_head(self, function: Callable[[Tensor], T], hidden_states: Tensor) -> T:
        """Call a function of hidden states that uses the methods below, once for all chunks.

        Ranks may have different numbers of chunks, and all of them collect a sharded head. In
        what the function returns at most one tensor may carry a gradient.
        """

    def cast_head(self) -> Tensor | None:
        """Return the weight of the head in 16 bits, or None if it need not be cast for a chunk."""

    def logits(self, hidden_states: Tensor, cast: Tensor | None = None) -> Tensor:
        """Return [T, V] for [T, H].

        Args:
            cast: What `cast_head` has returned.
        """


class TokenStatistics(NamedTuple):
    """Values per completion token, 0 on padding."""

    logprobs: Tensor
    """[N, C] natural logarithms under the sampling temperature."""
    entropy: Tensor
    """[N, C] nats, of the distribution that the token was sampled from."""


class TopTokens(NamedTuple):
    """The most likely tokens at the position of each completion token, 0 on padding."""

    ids: Tensor
    """[N, C, K] int32, the most likely one first."""
    logprobs: Tensor
    """[N, C, K] natural logarithms under the sampling temperature, over the whole vocabulary."""


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
    statistics, _ = candidate_statistics(
        model,
        batch,
        None,
        temperature=temperature,
        entropy_gradient=entropy_gradient,
        chunk_logits=chunk_logits,
    )
    return statistics


def candidate_statistics(
    model: CausalModel,
    batch: TokenBatch,
    candidates: Tensor | None,
    *,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
    chunk_logits: int = CHUNK_LOGITS,
) -> tuple[TokenStatistics, Tensor | None]:
    """Return `completion_statistics`, and [N, C, K] logprobs of other tokens in each place.

    Args:
        candidates: [N, C, K] ids of the other tokens, on the CPU; None for none.
    """
    function = partial(
        _chunk_statistics, model, temperature=temperature, entropy_gradient=entropy_gradient
    )
    ids = [batch.completion_ids] if candidates is None else [batch.completion_ids, candidates]
    (values,) = _in_chunks(function, model, batch, ids, chunk_logits)
    logprobs, entropy = values[..., 0].contiguous(), values[..., 1].contiguous()
    if not entropy_gradient:
        entropy = entropy.detach()
    others = None if candidates is None else values[..., 2:].contiguous()
    return TokenStatistics(logprobs, entropy), others


@torch.no_grad()
def top_tokens(
    model: CausalModel,
    batch: TokenBatch,
    k: int,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    chunk_logits: int = CHUNK_LOGITS,
) -> TopTokens:
    """Return the k most likely tokens at each position among the first of the vocabulary.

    Args:
        k: If the vocabulary is smaller, all of it is returned.
        vocab_size: Number of tokens to choose from.
    """
    function = partial(
        _chunk_top, model, k=min(k, vocab_size), vocab_size=vocab_size, temperature=temperature
    )
    return TopTokens(*_in_chunks(function, model, batch, [], chunk_logits))


def _in_chunks(
    function: Callable[..., tuple[Tensor, ...]],
    model: CausalModel,
    batch: TokenBatch,
    ids: Sequence[Tensor],
    chunk_logits: int,
) -> list[Tensor]:
    """Run a function over the completion tokens of a batch, in chunks of few logits.

    Args:
        function: Makes tensors [M, *] of hidden states, the head's weight if it has been cast, the
            [M] indices of the states that predict M tokens, and their ids.
        ids: [N, C, *] token ids, from which the function gets the ids of its tokens.

    Returns:
        [N, C, *] what the function makes, 0 on padding.
    """
    return model.run(partial(_run_in_chunks, function, model, batch, ids, chunk_logits))


def _run_in_chunks(
    function: Callable[..., tuple[Tensor, ...]],
    model: CausalModel,
    batch: TokenBatch,
    ids: Sequence[Tensor],
    chunk_logits: int,
) -> list[Tensor]:
    get_states = packed_states if model.uses_packing else padded_states
    hidden_states, predictors = get_states(model, batch)
    device = hidden_states.device
    flat = [one[batch.completion_mask].to(device, non_blocking=True) for one in ids]
    size = max(1, chunk_logits // model.vocab_size)
    run_head = partial(_run_head, function, model, [predictors, *flat], size)
    values = model.with_head(run_head, hidden_states)
    return [_unflatten(one, batch.completion_mask) for one in values]


def _run_head(
    function: Callable[..., tuple[Tensor, ...]],
    model: CausalModel,
    tokens: Sequence[Tensor],
    size: int,
    hidden_states: Tensor,
) -> list[Tensor]:
    """Return what a function makes of the predictors and ids of M tokens, in chunks of a size."""
    cast = None
    if len(tokens[0]) > size:  # with a single chunk, recomputing its logits would save no memory
        function = partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)
        cast = model.cast_head()
    parts = zip(*(torch.split(one, size) for one in tokens), strict=True)
    chunks = [function(hidden_states, cast, *part) for part in parts]
    return [torch.cat(parts) for parts in zip(*chunks, strict=True)]


def _unflatten(values: Tensor, mask: Tensor) -> Tensor:
    """Return [N, C, *] the values [M, *] at the M places in the mask, 0 elsewhere.

    The mask is on the CPU, so that the host waits for no device to count its places, as it would
    in the backward pass of ``masked_scatter``.
    """
    places = mask.flatten().nonzero()[:, 0].to(values.device, non_blocking=True)
    empty = values.new_zeros(mask.numel(), *values.shape[1:])
    return empty.index_copy(0, places, values).view(*mask.shape, *values.shape[1:])


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
    # The state at position t predicts token t + 1, so the last prompt token's state predicts the
    # first completion token.
    predicts = torch.zeros_like(mask)
    predicts[:, batch.prompt_ids.shape[1] - 1 : -1] = batch.completion_mask
    return hidden_states.flatten(0, 1), predicts.flatten().nonzero()[:, 0]


def _chunk_statistics(
    model: CausalModel,
    hidden_states: Tensor,
    cast: Tensor | None,
    predictors: Tensor,
    targets: Tensor,
    *candidates: Tensor,
    temperature: float,
    entropy_gradient: bool,
) -> tuple[Tensor, ...]:
    """Return [M, 2 + K] logprobs and entropies of [M] targets, and logprobs of candidates."""
    logits, which = _distinct_logits(model, hidden_states, cast, predictors, temperature)
    ids = torch.cat([targets[:, None], *(one.long() for one in candidates)], 1)
    logprobs, entropy = chosen_logprobs(logits, which, ids, entropy_gradient=entropy_gradient)
    return (torch.cat([logprobs[:, :1], entropy[which, None], logprobs[:, 1:]], 1),)


def _chunk_top(
    model: CausalModel,
    hidden_states: Tensor,
    cast: Tensor | None,
    predictors: Tensor,
    *,
    k: int,
    vocab_size: int,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Return ids and logprobs [M, k] of the most likely tokens."""
    logits, which = _distinct_logits(model, hidden_states, cast, predictors, temperature)
    logprobs, ids = logits.log_softmax(-1)[:, :vocab_size].topk(k)
    return ids.int()[which], logprobs[which]


def _distinct_logits(
    model: CausalModel,
    hidden_states: Tensor,
    cast: Tensor | None,
    predictors: Tensor,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Return [T, V] in float32 for any dtype of the model, and [M] the row of each predictor.

    A hidden state that predicts several tokens runs through the head once.
    """
    indices = torch.unique(predictors, return_inverse=True)
    distinct, which = (index.to(hidden_states.device, non_blocking=True) for index in indices)
    logits = model.logits(hidden_states.index_select(0, distinct), cast).float()
    return logits if temperature == 1 else logits / temperature, which
