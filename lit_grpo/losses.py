"""Surrogates, KL estimators and aggregations: three independent choices of pure functions.

A surrogate and a KL estimator give one value a token; an aggregation gives each token's weight
in the loss, from the counts of the whole optimizer batch. Hence the loss is a plain weighted sum,
the same for any split over micro-batches or ranks. Nothing here reads a model or keeps state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lit_grpo.types import TrainBatch


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What an optimizer step minimises.

    Args:
        surrogate: How ratio and advantage become a loss; a key of ``SURROGATES``.
        clip_low: The ratio's lower bound is ``1 - clip_low``.
        clip_high: Its upper bound is ``1 + clip_high`` (0.28 in DAPO, "clip-higher").
        aggregation: How the tokens are weighed; a key of ``AGGREGATIONS``.
        kl: Estimator of the divergence from the reference; a key of ``KL_ESTIMATORS``.
        kl_coef: Its weight in the loss; at 0 no reference is loaded.
        entropy_coef: Weight of the entropy bonus.
        sampler_ratio_cap: Upper bound of the importance ratio between trainer and sampler, by
            which each token's surrogate is multiplied; null for no correction.
        overlong_filtering: Leave completions that hit ``max_tokens`` out of the loss.

    Raises:
        ValueError: a bound or coefficient out of range.
    """

    surrogate: Literal["clip"] = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    aggregation: Literal["token", "sequence", "constant"] = "token"
    kl: Literal["k1", "k2", "k3"] = "k3"
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    sampler_ratio_cap: float | None = 2.0
    overlong_filtering: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low <= 1 or self.clip_high < 0:
            raise ValueError(
                "clip_low must lie in [0, 1] and clip_high must be >= 0, got "
                f"{self.clip_low} and {self.clip_high} (the ratio is held in [1 - clip_low, "
                "1 + clip_high]). Set model.objective.clip_low and clip_high."
            )
        if self.kl_coef < 0:
            raise ValueError(
                f"kl_coef must be >= 0, got {self.kl_coef} (a negative one drives the policy away "
                "from the reference). Set model.objective.kl_coef."
            )
        if self.sampler_ratio_cap is not None and self.sampler_ratio_cap <= 0:
            raise ValueError(
                f"sampler_ratio_cap must be > 0 or null, got {self.sampler_ratio_cap} (it bounds "
                "a ratio of probabilities). Set model.objective.sampler_ratio_cap."
            )


def clip(ratio: Tensor, advantages: Tensor, objective: Objective) -> Tensor:
    """[N, C] the pessimistic of the plain and the clipped policy gradient loss.

    Source: PPO, arXiv 1707.06347 equation 7; with ``clip_high > clip_low`` DAPO, arXiv 2503.14476
    equation 10.
    """
    clipped = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


SURROGATES: dict[str, Callable[[Tensor, Tensor, Objective], Tensor]] = {"clip": clip}


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``log(pi / ref)``: unbiased in value; differentiated in a loss its expected gradient is 0.

    Source of all three: J. Schulman, Approximating KL Divergence (2020).
    """
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``log(pi / ref)^2 / 2``: biased in value, its gradient is that of the reverse KL."""
    return (logprobs - ref_logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``ref / pi - log(ref / pi) - 1``: unbiased in value and never negative.

    Source: GRPO, arXiv 2402.03300 equation 4.
    """
    log_ratio = ref_logprobs - logprobs
    return log_ratio.exp() - log_ratio - 1


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """What one optimizer batch holds over all micro-batches and ranks."""

    tokens: int
    """Tokens with a True in the loss mask."""
    sequences: int
    """Rows with at least one such token."""
    max_tokens: int
    """The sampling limit, the constant of Dr. GRPO."""


def by_token(mask: Tensor, counts: TokenCounts) -> Tensor:
    """Every token of the optimizer batch weighs the same (DAPO, arXiv 2503.14476 equation 12)."""
    return mask / max(1, counts.tokens)


def by_sequence(mask: Tensor, counts: TokenCounts) -> Tensor:
    """Every sequence weighs the same, its tokens share it (GRPO, arXiv 2402.03300 equation 3)."""
    return mask / (mask.sum(1, keepdim=True).clamp(min=1) * max(1, counts.sequences))


def by_constant(mask: Tensor, counts: TokenCounts) -> Tensor:
    """Every token weighs ``1 / (sequences * max_tokens)``, whatever was sampled, so that length
    is neither rewarded nor punished (Dr. GRPO, arXiv 2503.20783 section 3.2)."""
    return mask / (max(1, counts.sequences) * counts.max_tokens)


AGGREGATIONS: dict[str, Callable[[Tensor, TokenCounts], Tensor]] = {
    "token": by_token,
    "sequence": by_sequence,
    "constant": by_constant,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """One micro-batch's terms, [N, C] each. The loss is ``(total * weights).sum()``."""

    total: Tensor
    """With gradient."""
    surrogate: Tensor
    kl: Tensor | None
    """None without a reference."""
    ratio: Tensor
    """Current over old policy."""
    clipped_low: Tensor
    """True where the lower bound cut the gradient."""
    clipped_high: Tensor
    sampler_log_ratio: Tensor
    """Old policy over sampler, its logarithm, before the cap."""


def token_losses(
    logprobs: Tensor, entropy: Tensor, batch: TrainBatch, objective: Objective
) -> TokenLosses:
    """The objective for every token of a micro-batch.

    Args:
        logprobs: [N, C] under the current policy, with gradient.
        entropy: [N, C] nats, with gradient where ``entropy_coef`` is not 0.
    """
    old_logprobs = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    advantages = batch.advantages[:, None].to(logprobs.dtype)
    ratio = (logprobs - old_logprobs).exp()
    surrogate = SURROGATES[objective.surrogate](ratio, advantages, objective)
    sampler_log_ratio = old_logprobs - batch.sampler_logprobs
    if objective.sampler_ratio_cap is not None:
        surrogate = surrogate * sampler_log_ratio.exp().clamp(max=objective.sampler_ratio_cap)
    total, kl = surrogate - objective.entropy_coef * entropy, None
    if batch.ref_logprobs is not None:
        kl = KL_ESTIMATORS[objective.kl](logprobs, batch.ref_logprobs)
        total = total + objective.kl_coef * kl
    return TokenLosses(
        total=total,
        surrogate=surrogate.detach(),
        kl=None if kl is None else kl.detach(),
        ratio=ratio.detach(),
        clipped_low=(ratio < 1 - objective.clip_low) & (advantages < 0),
        clipped_high=(ratio > 1 + objective.clip_high) & (advantages > 0),
        sampler_log_ratio=sampler_log_ratio,
    )
