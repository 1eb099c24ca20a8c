"""The loss of a micro-batch, put together from the terms of the objective."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_grpo.objective.aggregations import AGGREGATIONS, TokenCounts, by_entropy_token
from lit_grpo.objective.config import Objective
from lit_grpo.objective.corrections import keeps_surrogate, sampler_weights
from lit_grpo.objective.kl import kl_in_loss
from lit_grpo.objective.ratios import RATIOS, bounded
from lit_grpo.objective.surrogates import SURROGATES, SurrogateInputs
from lit_grpo.types import TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """The loss of one micro-batch, and its terms [N, C] for metrics."""

    loss: Tensor
    """Scalar with gradient: the share of this micro-batch in the loss of the optimizer step."""
    surrogate: Tensor
    kl: Tensor | None
    """None without a KL term in the loss."""
    ratio: Tensor
    """Current over old policy, per token or per sequence (``Objective.ratio``)."""
    clipped_low: Tensor
    """True where the ratio is below the lower bound and the advantage is negative."""
    clipped_high: Tensor
    """True where the ratio is above the upper bound and the advantage is positive."""
    has_surrogate: Tensor
    """True on tokens in the loss whose surrogate the entropy and off-policy masks keep."""
    sampler_log_ratio: Tensor
    """Logarithm of the old policy over the sampler, unbounded."""
    weights: Tensor
    """The weight of each token in the loss."""


def token_losses(
    logprobs: Tensor,
    entropy: Tensor,
    batch: TrainBatch,
    counts: TokenCounts,
    objective: Objective,
    *,
    entropy_coef: float = 0.0,
) -> TokenLosses:
    """Return the loss of a micro-batch and its terms.

    ``loss = sum_t weight_t (surrogate_t + kl.coef KL_t) - entropy_coef mean_t entropy_t``

    Args:
        logprobs: [N, C] under the current policy, with gradient.
        entropy: [N, C] nats, with gradient if ``entropy_coef`` is not 0.
        counts: Counts of the whole mini-batch.
        entropy_coef: Coefficient of the entropy bonus in this optimizer step.
    """
    mask, advantages = batch.loss_mask, batch.advantages[:, None].to(logprobs.dtype)
    old_logprobs = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    log_ratio = bounded(logprobs - old_logprobs)
    sampler_log_ratio = old_logprobs - batch.sampler_logprobs
    inputs = SurrogateInputs(
        logprobs=logprobs,
        log_ratio=log_ratio,
        ratio=RATIOS[objective.ratio](log_ratio, mask),
        advantages=advantages,
        mask=mask,
        correction=_correction(sampler_log_ratio, mask, objective),
    )
    has_surrogate = _has_surrogate(inputs, batch, objective)
    surrogate = SURROGATES[objective.surrogate](inputs, objective) * has_surrogate
    total, kl = surrogate, None
    if batch.ref_logprobs is not None:
        kl = kl_in_loss(logprobs, batch.ref_logprobs, inputs.ratio, objective.kl)
        total = total + objective.kl.coef * kl
    weights = AGGREGATIONS[objective.aggregation](mask, counts)
    loss = (total * weights).sum()
    if entropy_coef != 0:
        bonus = (entropy * by_entropy_token(batch.surrogate_mask, counts)).sum()
        loss = loss - entropy_coef * bonus
    ratio, (low, high) = inputs.ratio.detach().expand_as(mask), objective.ratio_bounds
    return TokenLosses(
        loss=loss,
        surrogate=surrogate.detach(),
        kl=None if kl is None else kl.detach(),
        ratio=ratio,
        clipped_low=(ratio < low) & (advantages < 0),
        clipped_high=(ratio > high) & (advantages > 0),
        has_surrogate=has_surrogate & mask,
        sampler_log_ratio=sampler_log_ratio,
        weights=weights,
    )


def _correction(sampler_log_ratio: Tensor, mask: Tensor, objective: Objective) -> Tensor:
    """Return [N, *] bounded importance weights, 1 without a correction."""
    if objective.sampler_correction is None:
        return torch.ones_like(sampler_log_ratio[:, :1])
    return sampler_weights(sampler_log_ratio, mask, objective.sampler_correction)


def _has_surrogate(inputs: SurrogateInputs, batch: TrainBatch, objective: Objective) -> Tensor:
    """Return [N, C] False where a mask removes the surrogate.

    Such a token still counts in the aggregation.
    """
    if objective.off_policy_threshold is None:
        return batch.surrogate_mask
    policy_log_ratio = inputs.logprobs - batch.sampler_logprobs
    return batch.surrogate_mask & keeps_surrogate(
        policy_log_ratio, inputs.advantages, inputs.mask, objective.off_policy_threshold
    )
