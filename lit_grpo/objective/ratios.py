"""Ratios of probabilities, per token or per sequence, whose logarithms are bounded.

Logprobs that differ by more than `MAX_LOG_RATIO` come from a policy or a sampler that is broken on
that token. Unbounded, one such token would overflow, or outweigh the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Bound on a log ratio, in nats: a factor of 5e8. Beyond it a ratio is constant."""


def bounded(log_ratio: Tensor) -> Tensor:
    """Return log ratios within the bound; those outside it get no gradient."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return [N, 1], the mean over each row's tokens in the mask; 0 for a row without any."""
    return (values * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


def token_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Return [N, C], one ratio per token."""
    return log_ratio.exp()


def sequence_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Return [N, 1], the geometric mean of each sequence's ratios.

    Source: GSPO, arXiv 2507.18071 equation 7.
    """
    return sequence_mean(log_ratio, mask).exp()


RATIOS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": token_ratio,
    "sequence": sequence_ratio,
}
