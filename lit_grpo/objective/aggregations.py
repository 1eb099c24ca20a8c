"""Aggregations: the weight of each token in the loss, from the counts of the whole minibatch.

The loss is a plain weighted sum, so it does not depend on the split into micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lit_grpo.objective.inputs import TokenCounts


def by_token(mask: Tensor, counts: TokenCounts) -> Tensor:
    """Weight every token of the minibatch equally (DAPO, arXiv 2503.14476 equation 12).

    TRL: ``loss_type="dapo"``. verl: ``loss_agg_mode="token-mean"``.
    """
    return mask / max(1, counts.tokens)


def by_local_token(mask: Tensor, counts: TokenCounts) -> Tensor:
    """Give every rank the same weight, shared equally by its tokens.

    This is the loss of trainers that average the token means of their devices. On one rank it is
    `by_token`. TRL: ``loss_type="bnpo"``, which averages the means of micro-batches.
    """
    return mask / (max(1, counts.local_tokens) * counts.num_ranks)


def by_sequence(mask: Tensor, counts: TokenCounts) -> Tensor:
    """Give every sequence the same weight, shared equally by its tokens (GRPO, arXiv 2402.03300
    equation 3).

    TRL: ``loss_type="grpo"``. verl: ``loss_agg_mode="seq-mean-token-mean"``.
    """
    return mask / (mask.sum(1, keepdim=True).clamp(min=1) * max(1, counts.sequences))


def by_sequence_sum(mask: Tensor, counts: TokenCounts) -> Tensor:
    """Weight every token by ``1 / sequences``, which makes a sequence's weight proportional to
    its length (LUSPO, arXiv 2602.05261 equation 7).

    TRL: ``loss_type="luspo"``. verl: ``loss_agg_mode="seq-mean-token-sum"``.
    """
    return mask / max(1, counts.sequences)


def by_constant(mask: Tensor, counts: TokenCounts) -> Tensor:
    """Weight every token by ``1 / (sequences * max_tokens)``, whatever the lengths are, so that
    length is neither rewarded nor penalised (Dr. GRPO, arXiv 2503.20783 section 3.2).

    TRL: ``loss_type="dr_grpo"``. verl: ``loss_agg_mode="seq-mean-token-sum-norm"``.
    """
    return mask / (max(1, counts.sequences) * counts.max_tokens)


AGGREGATIONS: dict[str, Callable[[Tensor, TokenCounts], Tensor]] = {
    "token": by_token,
    "local_token": by_local_token,
    "sequence": by_sequence,
    "sequence_sum": by_sequence_sum,
    "constant": by_constant,
}


def by_entropy_token(mask: Tensor, counts: TokenCounts) -> Tensor:
    """Weight the tokens of the entropy bonus equally.

    The bonus is a mean over tokens under every aggregation, so its coefficient does not
    depend on that choice.
    """
    return mask / max(1, counts.entropy_tokens)


def by_good_token(mask: Tensor, counts: TokenCounts) -> Tensor:
    """Weight the tokens of good completions equally, under every aggregation as well."""
    return mask / max(1, counts.good_tokens)
