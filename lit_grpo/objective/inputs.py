"""The inputs of a micro-batch's loss, in the form that surrogates and your own functions get."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from lit_grpo.types import TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """The counts of one minibatch, which is all rows of an optimizer step on all ranks."""

    tokens: int
    """Tokens in the loss mask."""
    sequences: int
    """Rows with at least one token in the loss mask."""
    max_tokens: int
    """The sampling limit, which is the constant of Dr. GRPO."""
    local_tokens: int
    """The part of ``tokens`` on this rank."""
    num_ranks: int
    entropy_tokens: int
    """Tokens that the entropy bonus is averaged over."""
    good_tokens: int = 0
    """Tokens of good completions, which the likelihood term is averaged over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """A micro-batch on the device of the model. [N, *] is [N, C], or [N, 1] for one per sequence.

    N are its rows, C is the length of its longest completion.
    """

    logprobs: Tensor
    """[N, C] under the current policy, with gradient."""
    old_logprobs: Tensor
    """[N, C] under the old policy (``Objective.old_logprobs``)."""
    log_ratio: Tensor
    """[N, C] current over old policy, bounded, with gradient."""
    ratio: Tensor
    """[N, *] current over old policy, per token or per sequence (``Objective.ratio``)."""
    advantages: Tensor
    """[N, *]"""
    mask: Tensor
    """[N, C] True on the tokens in the loss."""
    correction: Tensor
    """[N, *] bounded ratio of the old policy over the sampler; 1 without a correction."""
    entropy: Tensor
    """[N, C] nats; with gradient if the objective has an entropy bonus or a function."""
    batch: TrainBatch
    """The rest: token ids, and logprobs of sampler and reference."""
    counts: TokenCounts
    """Counts of the whole minibatch; divide sums by them to get a mean over it."""
    metrics: dict[str, Tensor | float] = field(default_factory=dict)
    """[N, *] values to log, or one number: ``metrics["x"]`` becomes ``own/x``, the mean over the
    tokens in the loss."""
