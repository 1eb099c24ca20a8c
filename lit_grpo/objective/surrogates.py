"""Surrogates: turn ratio and advantage into one loss per token, or one per sequence.

Each is a pure function of `LossInputs`, named in a table. Surrogates apply the sampler
correction themselves because `vespo` needs its logarithm.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lit_grpo.objective.config import Objective
from lit_grpo.objective.inputs import LossInputs
from lit_grpo.objective.ratios import MAX_LOG_RATIO, sequence_mean


def clip(inputs: LossInputs, objective: Objective) -> Tensor:
    """Return [N, *] the larger of the unclipped and the clipped policy gradient loss.

    Source: PPO, arXiv 1707.06347 equation 7; with ``clip_high > clip_low`` DAPO, arXiv 2503.14476
    equation 10; at sequence level GSPO, arXiv 2507.18071 equation 5. ``ratio_cap`` is the delta
    of the two-sided clip (INTELLECT-2, arXiv 2505.07291), which for a negative advantage is dual
    clip's bound c (arXiv 1912.09729 equation 5).
    """
    ratio, advantages = inputs.ratio, inputs.advantages
    clipped = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    if objective.ratio_cap is not None:
        ratio = ratio.clamp(max=objective.ratio_cap)
    return -torch.minimum(ratio * advantages, clipped * advantages) * inputs.correction


def cispo(inputs: LossInputs, objective: Objective) -> Tensor:
    """Return [N, C] REINFORCE losses, weighted by the ratio without gradient and bounded above.

    Unlike `clip` it keeps the gradient of every token.

    Source: MiniMax-M1, arXiv 2506.13585 equations 4 and 5; like the paper, without a lower bound.
    """
    weight = inputs.ratio.clamp(max=1 + objective.clip_high).detach()
    return -weight * inputs.advantages * inputs.logprobs * inputs.correction


def sapo(inputs: LossInputs, objective: Objective) -> Tensor:
    """Return [N, *] losses with a sigmoid gate on the ratio instead of a clip.

    By default the gate is steeper where the advantage is not positive.

    Source: arXiv 2511.20347 equations 5 and 6.
    """
    positive, other = objective.sapo_temperatures
    temperature = torch.where(inputs.advantages > 0, positive, other)
    gate = torch.sigmoid(temperature * (inputs.ratio - 1)) * 4 / temperature
    return -gate * inputs.advantages * inputs.correction


def gmpo(inputs: LossInputs, objective: Objective) -> Tensor:
    """Return [N, 1] losses of the geometric mean of a sequence's clipped token ratios.

    Log ratios are clipped from above where the advantage is positive, from below elsewhere.

    Source: arXiv 2507.20673 equation 4.
    """
    log_ratio = inputs.log_ratio
    clipped = torch.where(
        inputs.advantages > 0,
        log_ratio.clamp(max=objective.clip_high),
        log_ratio.clamp(min=-objective.clip_low),
    )
    ratio = sequence_mean(clipped, inputs.mask).exp()
    return -ratio * inputs.advantages * _sequence_correction(inputs)


def _sequence_correction(inputs: LossInputs) -> Tensor:
    """Return [N, 1], the mean correction of each sequence."""
    correction = inputs.correction.expand_as(inputs.mask)
    return sequence_mean(correction, inputs.mask)


VESPO_LOG_BOUNDS = (math.log(1e-8), MAX_LOG_RATIO)
"""Bounds on the log weight of a sequence, which keep powers of the weight finite."""


def vespo(inputs: LossInputs, objective: Objective) -> Tensor:
    """Return [N, C] REINFORCE losses, weighted by ``e^l w^k e^(-l w)`` without gradient.

    w is the ratio of the current policy over the sampler for the whole sequence.

    Source: arXiv 2602.10693 version 3, equation 20.
    """
    low, high = VESPO_LOG_BOUNDS
    is_not_negative = inputs.advantages >= 0
    k, rate = (
        torch.where(is_not_negative, positive, negative)
        for positive, negative in zip(
            objective.vespo_positive, objective.vespo_negative, strict=True
        )
    )
    log_weight = (inputs.log_ratio.detach() * inputs.mask).sum(1, keepdim=True)
    log_correction = inputs.correction.log().clamp(low, high)
    if log_correction.shape[1] > 1:
        log_correction = log_correction * inputs.mask
    log_weight = (log_weight + log_correction.sum(1, keepdim=True)).clamp(low, high)
    weight = (rate + k * log_weight - rate * log_weight.exp()).exp()
    return -weight * inputs.advantages * inputs.logprobs


@torch.no_grad()
def tv_divergence(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return the total variation between two distributions over this token and all others."""
    return (logprobs.exp() - old_logprobs.exp()).abs()


@torch.no_grad()
def kl_divergence(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return KL(old || new), of the two distributions over this token and all others.

    The probability of all others is at least 1e-7, which keeps its logarithm finite.
    """
    new, old = (one.clamp(max=-1e-7) for one in (logprobs, old_logprobs))
    others = (-torch.expm1(old)).log() - (-torch.expm1(new)).log()
    return old.exp() * (old - new) - torch.expm1(old) * others


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tv": tv_divergence,
    "kl": kl_divergence,
}


def outside_bounds(inputs: LossInputs, objective: Objective) -> tuple[Tensor, Tensor]:
    """Return [N, C] True where a token has become too unlikely, and where too likely.

    That is judged by its ratio; for `dppo` by its divergence.
    """
    if objective.surrogate != "dppo":
        low, high = objective.ratio_bounds
        ratio = inputs.ratio.detach().expand_as(inputs.mask)
        return ratio < low, ratio > high
    divergence = DIVERGENCES[objective.dppo_divergence](inputs.logprobs, inputs.old_logprobs)
    is_likelier = inputs.logprobs.detach() > inputs.old_logprobs
    return (
        ~is_likelier & (divergence > objective.clip_low),
        is_likelier & (divergence > objective.clip_high),
    )


def dppo(inputs: LossInputs, objective: Objective) -> Tensor:
    """Return [N, C] losses without a clip, 0 on tokens that have moved too far already.

    Too far is a divergence from the old policy beyond the bound, in the direction in which the
    advantage would move the token further.

    Source: DPPO, arXiv 2602.04879, with the binary divergences.
    """
    too_low, too_high = outside_bounds(inputs, objective)
    is_kept = ~torch.where(inputs.advantages > 0, too_high, too_low)
    return -inputs.ratio * inputs.advantages * inputs.correction * is_kept


def none(inputs: LossInputs, objective: Objective) -> Tensor:
    """Return [N, C] zeros: the other terms are the whole loss."""
    return 0.0 * inputs.logprobs  # with a gradient, should no other term have one


SURROGATES: dict[str, Callable[[LossInputs, Objective], Tensor]] = {
    "clip": clip,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "vespo": vespo,
    "dppo": dppo,
    "none": none,
}
