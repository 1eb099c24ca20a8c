"""What is left out of the surrogate or weighed down: tokens and sequences that the sampler or an
older policy would hardly have written, and tokens that leave no choice.

Pure functions on tensors; none carries a gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lit_grpo.objective.config import SamplerCorrection
from lit_grpo.objective.surrogates import sequence_mean


def _of_token(log_ratio: Tensor, mask: Tensor) -> Tensor:
    return log_ratio * mask


def _of_sequence(log_ratio: Tensor, mask: Tensor) -> Tensor:
    return (log_ratio * mask).sum(1, keepdim=True)


LEVELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": _of_token,
    "sequence": _of_sequence,
    "geometric": sequence_mean,
}


def _truncate(ratio: Tensor, low: float, high: float) -> Tensor:
    return ratio.clamp(low, high)


def _mask(ratio: Tensor, low: float, high: float) -> Tensor:
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


OUTSIDE: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "truncate": _truncate,
    "mask": _mask,
}


@torch.no_grad()
def sampler_weights(log_ratio: Tensor, mask: Tensor, correction: SamplerCorrection) -> Tensor:
    """[N, C] of the old policy over the sampler to bounded weights [N, C] or [N, 1].

    Source: truncated, arXiv 1802.01561 section 4.1, and between trainer and sampler, Yao et al.,
    Your Efficient RL Framework Secretly Brings You Off-Policy RL Training (2025); masked by token,
    IcePop, arXiv 2510.18855; masked by sequence, arXiv 2510.26788.
    """
    ratio = LEVELS[correction.level](log_ratio, mask).exp()
    high = float("inf") if correction.max_ratio is None else correction.max_ratio
    return OUTSIDE[correction.outside](ratio, correction.min_ratio or 0.0, high)


@torch.no_grad()
def on_policy_rows(
    sampler_log_ratio: Tensor, advantages: Tensor, mask: Tensor, threshold: float
) -> Tensor:
    """[N, 1] True on sequences that keep their surrogate: an advantage that is not negative, or a
    mean of ``log(sampler / policy)`` of at most ``threshold``.

    Args:
        sampler_log_ratio: [N, C] current policy over sampler.
        advantages: [N, 1].

    Source: DeepSeek-V3.2, arXiv 2512.02556 equation 9.
    """
    return (advantages >= 0) | (sequence_mean(-sampler_log_ratio, mask) <= threshold)


@torch.no_grad()
def top_entropy_tokens(entropy: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """[N, C] True on the masked tokens whose entropy is at or above ``threshold``."""
    return mask & (entropy >= threshold)


ENTROPY_NOISE = 1e-5
"""Nats below which two entropies are the same: the completions of a prompt share the distribution
of their first token, and rounding must not divide them."""


def entropy_threshold(entropies: Tensor, fraction: float) -> float:
    """The entropy that ``fraction`` of the given tokens [T] reaches, in nats.

    Source: arXiv 2506.01939 section 5.
    """
    if not len(entropies):
        return 0.0
    # Of numpy, since torch's takes 16 million tokens at most.
    return float(np.quantile(entropies.double().cpu().numpy(), 1 - fraction)) - ENTROPY_NOISE
