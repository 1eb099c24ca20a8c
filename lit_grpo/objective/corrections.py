"""Weights and masks on the surrogate: sampler, off-policy sequences, entropy, covariance.

All functions are pure and return tensors without gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lit_grpo.objective.custom import call
from lit_grpo.objective.ratios import bounded, sequence_mean
from lit_grpo.objective.terms import CovarianceTerm, SamplerCorrection, SamplerMask


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
    ratio = bounded(_log_weights(log_ratio, mask, correction)).exp()
    high = float("inf") if correction.max_ratio is None else correction.max_ratio
    return OUTSIDE[correction.outside](ratio, correction.min_ratio or 0.0, high)


def _log_weights(log_ratio: Tensor, mask: Tensor, correction: SamplerCorrection) -> Tensor:
    if isinstance(correction.level, str):
        return LEVELS[correction.level](log_ratio, mask)
    shapes = [tuple(mask.shape), (len(mask), 1)]
    what = "a logarithm per token or sequence"
    return call(correction.level, {"log_ratio": log_ratio, "mask": mask}, shapes, what)


STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "ratio": lambda log_ratio: log_ratio,
    "k2": lambda log_ratio: log_ratio.square() / 2,
    "k3": lambda log_ratio: log_ratio.exp() - 1 - log_ratio,
}
"""Statistics that `SamplerMask` compares, from [N, C] log ratios; ``ratio`` compares logarithms."""


def _maximum(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, -torch.inf).amax(1, keepdim=True)


OVER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": _per_token,
    "sum": _sequence_sum,
    "mean": sequence_mean,
    "maximum": _maximum,
}


@torch.no_grad()
def passes_sampler_mask(log_ratio: Tensor, mask: Tensor, settings: SamplerMask) -> Tensor:
    """Return [N, C] or [N, 1] True on the tokens or sequences that keep their surrogate.

    Args:
        log_ratio: [N, C] old policy over sampler.

    Source: masked sequences with weighted tokens, Liu et al., When Speed Kills Stability (2025);
    geometric masks, arXiv 2510.26788.
    """
    statistic = OVER[settings.over](STATISTICS[settings.statistic](bounded(log_ratio)), mask)
    if settings.statistic == "ratio":
        statistic = bounded(statistic).exp()
    low, high = settings.bounds
    return (statistic >= low) & (statistic <= high)


@torch.no_grad()
def passes_off_policy_mask(
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


def covariances(logprobs: Tensor, advantages: Tensor, means: tuple[float, float]) -> Tensor:
    """Return the part of each token in the covariance of logprob and advantage.

    Args:
        means: The means of logprobs and advantages over all tokens of the rollout step.

    Source: arXiv 2505.22617 equation 10.
    """
    return (logprobs - means[0]) * (advantages - means[1])


def is_high_covariance(
    values: Tensor, draws: Tensor, covariance: CovarianceTerm, num_tokens: int
) -> Tensor:
    """Return [T] True on the tokens of a rollout step that the term applies to.

    Args:
        values: [T] `covariances` of the tokens on all ranks.
        draws: [T] uniform random numbers; the smallest are drawn.

    Source: Clip-Cov and KL-Cov, arXiv 2505.22617 equations 11 and 12.
    """
    count = max(1, int(covariance.fraction * num_tokens))
    if covariance.action == "kl":
        return values >= values.topk(min(count, len(values))).values[-1]
    is_candidate = (values > covariance.low) & (values < covariance.high)
    draws = torch.where(is_candidate, draws, torch.inf)
    return is_candidate & (draws <= draws.sort().values[:count][-1])
