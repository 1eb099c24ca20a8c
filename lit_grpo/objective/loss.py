"""The objective of a micro-batch: its terms put together. Reads no model and keeps no state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_grpo.objective.aggregations import AGGREGATIONS, TokenCounts, by_entropy_token
from lit_grpo.objective.config import Objective
from lit_grpo.objective.corrections import on_policy_rows, sampler_weights
from lit_grpo.objective.kl import kl_in_loss
from lit_grpo.objective.surrogates import RATIOS, SURROGATES, PolicyTerms
from lit_grpo.types import TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """One micro-batch's terms, [N, C] each, and the loss that they make."""

    loss: Tensor
    """[] with gradient: this micro-batch's share of the loss of the whole optimizer step."""
    surrogate: Tensor
    kl: Tensor | None
    """None without a reference in the loss."""
    ratio: Tensor
    """Current over old policy, at the objective's level."""
    beyond_low: Tensor
    """True where the ratio is below the lower bound and the advantage is negative."""
    beyond_high: Tensor
    """True where the ratio is above the upper bound and the advantage is positive."""
    kept: Tensor
    """True on the tokens of the loss mask that have a surrogate: no mask took them out."""
    sampler_log_ratio: Tensor
    """Old policy over sampler, its logarithm, before any bound."""
    weights: Tensor
    """What each token weighs in the loss."""


def token_losses(
    logprobs: Tensor,
    entropy: Tensor,
    batch: TrainBatch,
    counts: TokenCounts,
    objective: Objective,
    *,
    entropy_coef: float = 0.0,
) -> TokenLosses:
    """The objective for every token of a micro-batch.

    ``loss = sum_t weight_t (surrogate_t + kl.coef KL_t) - entropy_coef mean_t entropy_t``

    Args:
        logprobs: [N, C] under the current policy, with gradient.
        entropy: [N, C] nats, with gradient where ``entropy_coef`` is not 0.
        counts: Of the whole optimizer batch.
        entropy_coef: Of this optimizer step.
    """
    mask, advantages = batch.loss_mask, batch.advantages[:, None].to(logprobs.dtype)
    old_logprobs = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    log_ratio = logprobs - old_logprobs
    sampler_log_ratio = old_logprobs - batch.sampler_logprobs
    terms = PolicyTerms(
        logprobs=logprobs,
        log_ratio=log_ratio,
        ratio=RATIOS[objective.ratio](log_ratio, mask),
        advantages=advantages,
        mask=mask,
        correction=_correction(sampler_log_ratio, mask, objective),
    )
    kept = _kept_tokens(terms, batch, objective)
    surrogate = SURROGATES[objective.surrogate](terms, objective) * kept
    total, kl = surrogate, None
    if batch.ref_logprobs is not None:
        kl = kl_in_loss(logprobs, batch.ref_logprobs, terms.ratio, objective.kl)
        total = total + objective.kl.coef * kl
    weights = AGGREGATIONS[objective.aggregation](mask, counts)
    loss = (total * weights).sum()
    if entropy_coef != 0:
        bonus = (entropy * by_entropy_token(batch.surrogate_mask, counts)).sum()
        loss = loss - entropy_coef * bonus
    ratio, (low, high) = terms.ratio.detach().expand_as(mask), objective.ratio_bounds
    return TokenLosses(
        loss=loss,
        surrogate=surrogate.detach(),
        kl=None if kl is None else kl.detach(),
        ratio=ratio,
        beyond_low=(ratio < low) & (advantages < 0),
        beyond_high=(ratio > high) & (advantages > 0),
        kept=kept & mask,
        sampler_log_ratio=sampler_log_ratio,
        weights=weights,
    )


def _correction(sampler_log_ratio: Tensor, mask: Tensor, objective: Objective) -> Tensor:
    """[N, *] bounded importance weights, 1 without a correction."""
    if objective.sampler_correction is None:
        return torch.ones_like(sampler_log_ratio[:, :1])
    return sampler_weights(sampler_log_ratio, mask, objective.sampler_correction)


def _kept_tokens(terms: PolicyTerms, batch: TrainBatch, objective: Objective) -> Tensor:
    """[N, C] False where a mask takes the surrogate out; such a token still counts in the
    aggregation."""
    kept = batch.surrogate_mask
    if objective.off_policy_threshold is not None:
        log_ratio = terms.logprobs - batch.sampler_logprobs
        kept = kept & on_policy_rows(
            log_ratio, terms.advantages, terms.mask, objective.off_policy_threshold
        )
    return kept
