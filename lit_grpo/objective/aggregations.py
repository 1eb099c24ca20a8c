"""Aggregations: each token's weight in the loss, from the counts of the whole optimizer batch.

Hence the loss is a plain weighted sum, the same for any split over micro-batches or ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """What one optimizer batch holds, over all micro-batches."""

    tokens: int
    """Tokens with a True in the loss mask, on all ranks."""
    sequences: int
    """Rows with at least one such token, on all ranks."""
    max_tokens: int
    """The sampling limit, the constant of Dr. GRPO."""
    local_tokens: int
    """Of ``tokens`` those on this rank."""
    num_ranks: int
    entropy_tokens: int
    """Of ``tokens`` those that the entropy bonus is a mean of, on all ranks."""


def by_token(mask: Tensor, counts: TokenCounts) -> Tensor:
    """Every token of the optimizer batch weighs the same (DAPO, arXiv 2503.14476 equation 12)."""
    return mask / max(1, counts.tokens)


def by_local_token(mask: Tensor, counts: TokenCounts) -> Tensor:
    """Every rank weighs the same, the tokens of its part of the optimizer batch share it: what
    trainers do that average each device's token mean. On one rank it is `by_token`."""
    return mask / (max(1, counts.local_tokens) * counts.num_ranks)


def by_sequence(mask: Tensor, counts: TokenCounts) -> Tensor:
    """Every sequence weighs the same, its tokens share it (GRPO, arXiv 2402.03300 equation 3)."""
    return mask / (mask.sum(1, keepdim=True).clamp(min=1) * max(1, counts.sequences))


def by_sequence_sum(mask: Tensor, counts: TokenCounts) -> Tensor:
    """Every token weighs ``1 / sequences``: a sequence weighs its length (LUSPO, arXiv 2602.05261
    equation 7)."""
    return mask / max(1, counts.sequences)


def by_constant(mask: Tensor, counts: TokenCounts) -> Tensor:
    """Every token weighs ``1 / (sequences * max_tokens)``, whatever was sampled, so that length
    is neither rewarded nor punished (Dr. GRPO, arXiv 2503.20783 section 3.2)."""
    return mask / (max(1, counts.sequences) * counts.max_tokens)


AGGREGATIONS: dict[str, Callable[[Tensor, TokenCounts], Tensor]] = {
    "token": by_token,
    "local_token": by_local_token,
    "sequence": by_sequence,
    "sequence_sum": by_sequence_sum,
    "constant": by_constant,
}


def by_entropy_token(mask: Tensor, counts: TokenCounts) -> Tensor:
    """Weights of the entropy bonus, a mean over tokens whatever the aggregation: its coefficient
    means the same beside each."""
    return mask / max(1, counts.entropy_tokens)
