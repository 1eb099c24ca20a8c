"""Logprobs of chosen tokens, and entropies, in the memory of the logits that they are made from.

The one tensor [T, V] holds the logits, then the logprobs of all tokens, then the gradient. Autograd
alone would make five of them, each new to the CPU's cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CACHED_LOGITS = 2**17
"""Logits that fit into the cache of a CPU: half a MB."""


def chosen_logprobs(
    logits: Tensor, which: Tensor, ids: Tensor, *, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return [M, K] logprobs of tokens, and [T] entropies in nats; the logits are overwritten.

    A token of probability 0 adds nothing to an entropy.

    Args:
        logits: [T, V] in float32, which no other operation needs, also for its gradient.
        which: [M] the row of the logits that the tokens are chosen from.
        ids: [M, K] tokens.
        entropy_gradient: Whether the entropy carries a gradient.
    """
    chosen: Any = _ChosenLogprobs.apply  # torch does not annotate it
    with torch.autocast(logits.device.type, enabled=False):
        logprobs, entropy = chosen(logits, which, ids, entropy_gradient)
    return logprobs, entropy


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, which: Tensor, ids: Tensor, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        entropies = []
        for rows in torch.split(logits, _num_cached(logits)):
            rows.copy_(rows.log_softmax(-1))
            entropies.append(_entropy(rows))
        entropy = torch.cat(entropies)
        ctx.save_for_backward(logits, entropy, which, ids)
        ctx.entropy_gradient = entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logits[which[:, None], ids], entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_logprobs: Tensor, of_entropy: Tensor
    ) -> tuple[Tensor, None, None, None]:
        """Turn the saved logprobs into the gradient of the logits.

        With probabilities p, a logprob's gradient is 1 at the token minus p, and the entropy H's
        is -p (log p + H). A second backward pass through the same graph raises an error of
        autograd, because what it needs has been overwritten.
        """
        saved, entropy, which, ids = ctx.saved_tensors
        logits = saved.detach()
        # Unlike index_add_, this sums in the same order each time on a GPU.
        of_rows = torch.zeros_like(entropy)
        of_rows.index_put_((which,), of_logprobs.sum(1), accumulate=True)
        of_each = (logits, of_rows, of_entropy, entropy)
        parts = (torch.split(one, _num_cached(logits)) for one in of_each)
        for rows, of_chosen, of_own, own in zip(*parts, strict=True):
            weight = of_chosen[:, None]
            if ctx.entropy_gradient:
                weight = weight + of_own[:, None] * (_finite(rows) + own[:, None])
            rows.exp_().mul_(-weight)
        logits.index_put_((which[:, None], ids), of_logprobs, accumulate=True)
        return logits, None, None, None


def _num_cached(logits: Tensor) -> int:
    """Return how many rows of a CPU's logits fit into its cache; on a GPU all are one part."""
    num_rows, vocab_size = logits.shape
    return num_rows if logits.device.type != "cpu" else max(1, CACHED_LOGITS // vocab_size)


def _entropy(log_probabilities: Tensor) -> Tensor:
    """Return [T] nats for [T, V]."""
    negative: Tensor = torch.linalg.vecdot(log_probabilities.exp(), _finite(log_probabilities))
    return -negative


def _finite(log_probabilities: Tensor) -> Tensor:
    return log_probabilities.clamp(min=-1e30)
