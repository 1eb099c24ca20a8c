"""The loss of a micro-batch, put together from the terms of the objective."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_grpo.objective.aggregations import AGGREGATIONS, by_entropy_token, by_good_token
from lit_grpo.objective.config import Objective
from lit_grpo.objective.corrections import (
    passes_off_policy_mask,
    passes_sampler_mask,
    sampler_weights,
)
from lit_grpo.objective.custom import Function, call, checked_metrics
from lit_grpo.objective.distillation import sampled_divergence, top_divergence
from lit_grpo.objective.inputs import LossInputs, TokenCounts
from lit_grpo.objective.kl import kl_in_loss
from lit_grpo.objective.ratios import RATIOS, bounded
from lit_grpo.objective.surrogates import SURROGATES, outside_bounds
from lit_grpo.types import TrainBatch

ROUNDING = 1e-5
"""Logprobs of the same policy differ by up to this many nats between two passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """The loss of one micro-batch, and its terms [N, C] for metrics."""

    loss: Tensor
    """Scalar with gradient: the share of this micro-batch in the loss of the optimizer step."""
    surrogate: Tensor
    kl: Tensor | None
    """None without a KL term in the loss."""
    distillation_kl: Tensor | None
    """Divergence from the teacher; None without one."""
    ratio: Tensor
    """Current over old policy, per token or per sequence (``Objective.ratio``)."""
    clipped_low: Tensor
    """True where the ratio is below the lower bound and the advantage is negative."""
    clipped_high: Tensor
    """True where the ratio is above the upper bound and the advantage is positive."""
    has_surrogate: Tensor
    """True on tokens in the loss whose surrogate no mask removes."""
    sampler_log_ratio: Tensor
    """Logarithm of the policy before the first update over the sampler, unbounded."""
    weights: Tensor
    """The weight of each token in the loss."""
    own_metrics: dict[str, Tensor]
    """[N, *] what the user's functions log."""


def token_losses(
    logprobs: Tensor,
    entropy: Tensor,
    batch: TrainBatch,
    counts: TokenCounts,
    objective: Objective,
    *,
    entropy_coef: float = 0.0,
    kl_coef: float | None = None,
    candidate_logprobs: Tensor | None = None,
) -> TokenLosses:
    """Return the loss of a micro-batch and its terms.

    ``loss = sum_t weight_t (surrogate_t + kl_coef KL_t + distillation.coef D_t + covariance_t)
    - entropy_coef mean_t entropy_t - sft.coef mean over good completions of logprob_t``, where
    ``covariance_t`` is the penalty of KL-Cov, on its tokens alone.

    Args:
        logprobs: [N, C] under the current policy, with gradient.
        entropy: [N, C] nats, with gradient if ``entropy_coef`` is not 0.
        counts: Counts of the whole minibatch.
        entropy_coef: Coefficient of the entropy bonus in this optimizer step.
        kl_coef: Coefficient of the KL term; None for the objective's.
        candidate_logprobs: [N, C, K] of ``batch.teacher_ids`` under the current policy, with
            gradient.
    """
    inputs = _inputs(logprobs, entropy, batch, counts, objective)
    mask, advantages = inputs.mask, inputs.advantages
    has_surrogate = _has_surrogate(inputs, objective)
    surrogate = _surrogate(inputs, objective) * has_surrogate
    total = surrogate + _covariance_penalty(inputs, objective)
    kl = None
    if batch.ref_logprobs is not None:
        kl = kl_in_loss(logprobs, batch.ref_logprobs, batch.sampler_logprobs, objective.kl)
        total = total + (objective.kl.coef if kl_coef is None else kl_coef) * kl
    divergence = _distillation_kl(logprobs, candidate_logprobs, batch)
    if divergence is not None:
        total = total + objective.distillation.coef * divergence
    weights = AGGREGATIONS[objective.aggregation](mask, counts)
    loss = (total * weights).sum() - _bonuses(inputs, objective, entropy_coef)
    if objective.function is not None:
        loss = _call_own(objective.function, inputs, objective, [()], "the loss of the micro-batch")
    too_low, too_high = outside_bounds(inputs, objective)
    return TokenLosses(
        loss=loss,
        surrogate=surrogate.detach(),
        kl=None if kl is None else kl.detach(),
        distillation_kl=None if divergence is None else divergence.detach(),
        ratio=inputs.ratio.detach().expand_as(mask),
        clipped_low=too_low & (advantages < 0),
        clipped_high=too_high & (advantages > 0),
        has_surrogate=has_surrogate & mask,
        sampler_log_ratio=_before_update(logprobs, batch) - batch.sampler_logprobs,
        weights=weights,
        own_metrics=checked_metrics(inputs.metrics, mask),
    )


def _bonuses(inputs: LossInputs, objective: Objective, entropy_coef: float) -> Tensor | float:
    """Return the entropy bonus and the likelihood of good completions, times their coefficients."""
    batch, counts = inputs.batch, inputs.counts
    bonuses: Tensor | float = 0.0
    if entropy_coef != 0:
        mean = (inputs.entropy * by_entropy_token(batch.surrogate_mask, counts)).sum()
        bonuses = bonuses + entropy_coef * mean
    if batch.is_good is not None:
        good = by_good_token(inputs.mask & batch.is_good[:, None], counts)
        bonuses = bonuses + objective.sft.coef * (inputs.logprobs * good).sum()
    return bonuses


def _distillation_kl(
    logprobs: Tensor, candidate_logprobs: Tensor | None, batch: TrainBatch
) -> Tensor | None:
    """Return [N, C] divergences from the teacher, None without one."""
    if batch.teacher_logprobs is None:
        return None
    if candidate_logprobs is None:
        return sampled_divergence(logprobs, batch.teacher_logprobs, batch.sampler_logprobs)
    return top_divergence(candidate_logprobs, batch.teacher_logprobs)


def _before_update(logprobs: Tensor, batch: TrainBatch) -> Tensor:
    """Return the logprobs of the policy before its first update in this rollout step."""
    return logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs


def _inputs(
    logprobs: Tensor, entropy: Tensor, batch: TrainBatch, counts: TokenCounts, objective: Objective
) -> LossInputs:
    """Return what surrogates read, with the ratio and correction that the objective asks for."""
    mask = batch.loss_mask
    is_from_sampler = objective.old_logprobs == "sampler"
    old = batch.sampler_logprobs if is_from_sampler else _before_update(logprobs, batch)
    log_ratio = bounded(logprobs - old)
    return LossInputs(
        logprobs=logprobs,
        old_logprobs=old,
        log_ratio=log_ratio,
        ratio=RATIOS[objective.ratio](log_ratio, mask),
        advantages=batch.advantages_by_token.to(logprobs.dtype),
        mask=mask,
        correction=_correction(old - batch.sampler_logprobs, mask, objective),
        entropy=entropy,
        batch=batch,
        counts=counts,
    )


def _correction(sampler_log_ratio: Tensor, mask: Tensor, objective: Objective) -> Tensor:
    """Return [N, *] bounded importance weights, 1 without a correction."""
    if objective.sampler_correction is None:
        return torch.ones_like(sampler_log_ratio[:, :1])
    return sampler_weights(sampler_log_ratio, mask, objective.sampler_correction)


def _surrogate(inputs: LossInputs, objective: Objective) -> Tensor:
    """Return [N, *] losses of the surrogate that the objective names."""
    if isinstance(objective.surrogate, str):
        return SURROGATES[objective.surrogate](inputs, objective)
    shapes = [tuple(inputs.mask.shape), (len(inputs.mask), 1)]
    what = "a loss per token or per sequence"
    return _call_own(objective.surrogate, inputs, objective, shapes, what)


def _call_own(
    function: Function,
    inputs: LossInputs,
    objective: Objective,
    shapes: list[tuple[int, ...]],
    what: str,
) -> Tensor:
    """Return what a user's function makes of the inputs, checked; it must have a gradient."""
    needed = inputs.logprobs.requires_grad
    arguments = {"inputs": inputs, "objective": objective}
    return call(function, arguments, shapes, what, needs_gradient=needed)


def _covariance_penalty(inputs: LossInputs, objective: Objective) -> Tensor | float:
    """Return [N, C] what pulls tokens of high covariance back to the old policy (KL-Cov)."""
    term, chosen = objective.covariance, inputs.batch.covariance_mask
    if term is None or chosen is None or term.action != "kl":
        return 0.0
    distance = inputs.log_ratio.abs()
    return term.coef * distance * (distance > ROUNDING) * chosen


def _has_surrogate(inputs: LossInputs, objective: Objective) -> Tensor:
    """Return [N, C] False where a mask removes the surrogate.

    Such a token still counts in the aggregation.
    """
    batch, mask = inputs.batch, inputs.mask
    kept = batch.surrogate_mask
    if objective.off_policy_threshold is not None:
        policy_log_ratio = inputs.logprobs - batch.sampler_logprobs
        kept = kept & passes_off_policy_mask(
            policy_log_ratio, inputs.advantages, mask, objective.off_policy_threshold
        )
    for settings in objective.sampler_masks:
        log_ratio = _before_update(inputs.logprobs, batch) - batch.sampler_logprobs
        kept = kept & passes_sampler_mask(log_ratio, mask, settings)
    term = objective.covariance
    if batch.covariance_mask is not None and term is not None and term.action == "clip":
        kept = kept & ~batch.covariance_mask
    return kept
