"""Surrogates: turn ratio and advantage into one loss per token, or one per sequence.

Each is a pure function of `SurrogateInputs`, named in a table. Surrogates apply the sampler
correction themselves because `vespo` needs its logarithm.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_grpo.objective.config import Objective
from lit_grpo.objective.ratios import MAX_LOG_RATIO, sequence_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class SurrogateInputs:
    """What a surrogate may read. [N, *] is [N, C], or [N, 1] with one value per sequence."""

    logprobs: Tensor
    """[N, C] under the current policy, with gradient."""
    log_ratio: Tensor
    """[N, C] current over old policy, bounded, with gradient."""
    ratio: Tensor
    """[N, *] current over old policy, per token or per sequence (``Objective.ratio``)."""
    advantages: Tensor
    """[N, 1]"""
    mask: Tensor
    """[N, C] True on the tokens in the loss."""
    correction: Tensor
    """[N, *] bounded ratio of the old policy over the sampler; 1 without a correction."""


def clip(inputs: SurrogateInputs, objective: Objective) -> Tensor:
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


def cispo(inputs: SurrogateInputs, objective: Objective) -> Tensor:
    """Return [N, C] REINFORCE losses, weighted by the ratio without gradient and bounded above.

    Unlike `clip` it keeps the gradient of every token.

    Source: MiniMax-M1, arXiv 2506.13585 equations 4 and 5; like the paper, without a lower bound.
    """
    weight = inputs.ratio.clamp(max=1 + objective.clip_high).detach()
    return -weight * inputs.advantages * inputs.logprobs * inputs.correction


def sapo(inputs: SurrogateInputs, objective: Objective) -> Tensor:
    """Return [N, *] losses with a sigmoid gate on the ratio instead of a clip.

    By default the gate is steeper where the advantage is not positive.

    Source: arXiv 2511.20347 equations 5 and 6.
    """
    positive, other = objective.sapo_temperatures
    temperature = torch.where(inputs.advantages > 0, positive, other)
    gate = torch.sigmoid(temperature * (inputs.ratio - 1)) * 4 / temperature
    return -gate * inputs.advantages * inputs.correction


def gmpo(inputs: SurrogateInputs, objective: Objective) -> Tensor:
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


def _sequence_correction(inputs: SurrogateInputs) -> Tensor:
    """Return [N, 1], the mean correction of each sequence."""
    correction = inputs.correction.expand_as(inputs.mask)
    return sequence_mean(correction, inputs.mask)


VESPO_LOG_BOUNDS = (math.log(1e-8), MAX_LOG_RATIO)
"""Bounds on the log weight of a sequence, which keep powers of the weight finite."""


def vespo(inputs: SurrogateInputs, objective: Objective) -> Tensor:
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


SURROGATES: dict[str, Callable[[SurrogateInputs, Objective], Tensor]] = {
    "clip": clip,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "vespo": vespo,
}
