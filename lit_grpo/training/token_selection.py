"""Select tokens by statistics over the whole rollout step, on all ranks."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lit_grpo.distributed.ranks import gather_objects, get_rank
from lit_grpo.objective import CovarianceTerm, Objective
from lit_grpo.objective.corrections import (
    covariances,
    entropy_threshold,
    is_high_covariance,
    top_entropy_tokens,
)
from lit_grpo.types import TrainBatch


def select_tokens(
    batch: TrainBatch, entropy: Tensor, objective: Objective, seed: int
) -> TrainBatch:
    """Return the batch with the masks of tokens that the objective asks for.

    Args:
        batch: With the old logprobs of all trained rows.
        entropy: [N, C] of the same tokens, in nats.
        seed: Seed of what is drawn at random.
    """
    if objective.top_entropy_fraction < 1:
        entropies = torch.cat(gather_objects(entropy[batch.loss_mask]))
        threshold = entropy_threshold(entropies, objective.top_entropy_fraction)
        chosen = top_entropy_tokens(entropy, batch.loss_mask, threshold)
        batch = replace(batch, entropy_mask=chosen)
    if objective.covariance is not None:
        batch = replace(batch, covariance_mask=_covariance_mask(batch, objective.covariance, seed))
    return batch


def _covariance_mask(batch: TrainBatch, term: CovarianceTerm, seed: int) -> Tensor:
    """Return [N, C] True on the tokens of high covariance."""
    assert batch.old_logprobs is not None
    mask, generator = batch.loss_mask, torch.Generator().manual_seed(seed)
    logprobs = batch.old_logprobs[mask].double()
    own = (
        logprobs,
        batch.advantages_by_token.expand_as(mask)[mask].double(),
        torch.rand(len(logprobs), generator=generator, dtype=torch.float64),
    )
    ranks = gather_objects(own)
    logprobs, values, draws = (torch.cat(parts) for parts in zip(*ranks, strict=True))
    products = covariances(logprobs, values, (float(logprobs.mean()), float(values.mean())))
    chosen = is_high_covariance(products, draws, term, len(products))
    sizes = [len(rank[0]) for rank in ranks]
    found = torch.zeros_like(mask)
    found[mask] = torch.split(chosen, sizes)[get_rank()]
    return found
