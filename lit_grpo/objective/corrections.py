"""Weights and masks on the surrogate: sampler correction, off-policy sequences, entropy.

All functions are pure and return tensors without gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lit_grpo.objective.config import SamplerCorrection
from lit_grpo.objective.ratios import bounded, sequence_mean


def _per_token(log_ratio: Tensor, mask: Tensor) -> Tensor:
    return log_ratio * mask


def _sequence_sum(log_ratio: Tensor, mask: Tensor) -> Tensor:
    return (log_ratio * mask).sum(1, keepdim=True)


LEVELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": _per_token,
    "sequence": _sequence_sum,
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
    """Return bounded importance weights, [N, C] or [N, 1].

    Args:
        log_ratio: [N, C] old policy over sampler.

    Source: truncated weights, arXiv 1802.01561 section 4.1; between trainer and sampler, Yao et
    al., Your Efficient RL Framework Secretly Brings You Off-Policy RL Training (2025); masked
    tokens, IcePop, arXiv 2510.18855; masked sequences, arXiv 2510.26788.
    """
    ratio = bounded(LEVELS[correction.level](log_ratio, mask)).exp()
    high = float("inf") if correction.max_ratio is None else correction.max_ratio
    return OUTSIDE[correction.outside](ratio, correction.min_ratio or 0.0, high)


@torch.no_grad()
def keeps_surrogate(
    policy_log_ratio: Tensor, advantages: Tensor, mask: Tensor, threshold: float
) -> Tensor:
    """Return [N, 1] True on the sequences that keep their surrogate.

    A sequence keeps it if its advantage is not negative or its mean of ``log(sampler / policy)``
    is at most ``threshold``.

    Args:
        policy_log_ratio: [N, C] current policy over sampler.
        advantages: [N, 1].

    Source: DeepSeek-V3.2, arXiv 2512.02556 equation 9.
    """
    return (advantages >= 0) | (sequence_mean(-policy_log_ratio, mask) <= threshold)


@torch.no_grad()
def top_entropy_tokens(entropy: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """Return [N, C] True on the tokens of the mask whose entropy is at least ``threshold``."""
    return mask & (entropy >= threshold)


ENTROPY_NOISE = 1e-5
"""Entropies that differ by less, in nats, count as equal: completions of a prompt share the
distribution of their first token, and rounding errors must not keep some and drop others."""


def entropy_threshold(entropies: Tensor, fraction: float) -> float:
    """Return the entropy in nats that the top ``fraction`` of the tokens [T] reach.

    Source: arXiv 2506.01939 section 5.
    """
    if not len(entropies):
        return 0.0
    # torch.quantile accepts at most 16 million values.
    return float(np.quantile(entropies.double().cpu().numpy(), 1 - fraction)) - ENTROPY_NOISE
