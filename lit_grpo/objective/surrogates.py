"""Surrogates: ratio and advantage to one loss a token, or one a sequence.

Pure functions of one `PolicyTerms`, named in a table. The sampler's correction is inside, since
one of them takes its logarithm. Aggregation and other terms are not their business.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_grpo.objective.config import Objective


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTerms:
    """What a surrogate may read. [N, *] is [N, C], or [N, 1] with one value a sequence."""

    logprobs: Tensor
    """[N, C] under the current policy, with gradient."""
    log_ratio: Tensor
    """[N, C] current over old policy, with gradient."""
    ratio: Tensor
    """[N, *] the same at the level that the objective asks for, not as a logarithm."""
    advantages: Tensor
    """[N, 1]"""
    mask: Tensor
    """[N, C] True on the tokens in the loss."""
    correction: Tensor
    """[N, *] old policy over sampler, bounded; 1 without a correction."""


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """[N, C] to [N, 1], the mean over each row's True tokens; 0 for a row without one."""
    return (values * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


def clip(terms: PolicyTerms, objective: Objective) -> Tensor:
    """[N, *] the pessimistic of the plain and the clipped policy gradient loss.

    Source: PPO, arXiv 1707.06347 equation 7; with ``clip_high > clip_low`` DAPO, arXiv 2503.14476
    equation 10; at sequence level GSPO, arXiv 2507.18071 equation 5. ``ratio_cap`` is the delta
    of the two-sided clip (INTELLECT-2, arXiv 2505.07291), which for a negative advantage is dual
    clip's bound c (arXiv 1912.09729 equation 5).
    """
    ratio, advantages = terms.ratio, terms.advantages
    clipped = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    if objective.ratio_cap is not None:
        ratio = ratio.clamp(max=objective.ratio_cap)
    return -torch.minimum(ratio * advantages, clipped * advantages) * terms.correction


def cispo(terms: PolicyTerms, objective: Objective) -> Tensor:
    """[N, C] REINFORCE under a ratio that is bounded above and carries no gradient, so that no
    token is cut off.

    Source: MiniMax-M1, arXiv 2506.13585 equations 4 and 5, without a lower bound as there.
    """
    weight = terms.ratio.clamp(max=1 + objective.clip_high).detach()
    return -weight * terms.advantages * terms.logprobs * terms.correction


def sapo(terms: PolicyTerms, objective: Objective) -> Tensor:
    """[N, *] a smooth gate in the clip's place, steeper where the advantage is not positive.

    Source: arXiv 2511.20347 equations 5 and 6.
    """
    positive, other = objective.sapo_temperatures
    temperature = torch.where(terms.advantages > 0, positive, other)
    gate = torch.sigmoid(temperature * (terms.ratio - 1)) * 4 / temperature
    return -gate * terms.advantages * terms.correction


def gmpo(terms: PolicyTerms, objective: Objective) -> Tensor:
    """[N, 1] the geometric mean over a sequence of its tokens' clipped ratios.

    The clip is pessimistic, token by token, and bounds logarithms.
    Source: arXiv 2507.20673 equation 4.
    """
    log_ratio = terms.log_ratio
    clipped = torch.where(
        terms.advantages > 0,
        log_ratio.clamp(max=objective.clip_high),
        log_ratio.clamp(min=-objective.clip_low),
    )
    ratio = sequence_mean(clipped, terms.mask).exp()
    return -ratio * terms.advantages * _sequence_correction(terms)


def _sequence_correction(terms: PolicyTerms) -> Tensor:
    """[N, 1] corrections of tokens as their mean over the sequence."""
    correction = terms.correction.expand_as(terms.mask)
    return sequence_mean(correction, terms.mask)


VESPO_LOG_BOUNDS = (math.log(1e-8), 20.0)
"""The logarithm of a sequence's weight is held between these, so that its power stays finite."""


def vespo(terms: PolicyTerms, objective: Objective) -> Tensor:
    """[N, C] REINFORCE under the weight ``e^l w^k e^(-l w)`` of the whole sequence, without
    gradient; w is the product over its tokens of the current policy over the sampler.

    Source: arXiv 2602.10693 version 3, equation 20.
    """
    low, high = VESPO_LOG_BOUNDS
    is_positive = terms.advantages >= 0
    k, rate = (
        torch.where(is_positive, positive, negative)
        for positive, negative in zip(
            objective.vespo_positive, objective.vespo_negative, strict=True
        )
    )
    log_weight = (terms.log_ratio.detach().clamp(-high, high) * terms.mask).sum(1, keepdim=True)
    log_correction = terms.correction.log().clamp(low, high)
    if log_correction.shape[1] > 1:
        log_correction = log_correction * terms.mask
    log_weight = (log_weight + log_correction.sum(1, keepdim=True)).clamp(low, high)
    weight = (rate + k * log_weight - rate * log_weight.exp()).exp()
    return -weight * terms.advantages * terms.logprobs


SURROGATES: dict[str, Callable[[PolicyTerms, Objective], Tensor]] = {
    "clip": clip,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "vespo": vespo,
}


def token_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """[N, C] one ratio a token."""
    return log_ratio.exp()


def sequence_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """[N, 1] the geometric mean of a sequence's ratios.

    Source: GSPO, arXiv 2507.18071 equation 7.
    """
    return sequence_mean(log_ratio, mask).exp()


RATIOS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": token_ratio,
    "sequence": sequence_ratio,
}
