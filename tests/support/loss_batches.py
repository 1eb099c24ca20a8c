"""Micro-batches of literal or random numbers, and their loss and gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lit_grpo.objective import Objective
from lit_grpo.objective.corrections import entropy_threshold, top_entropy_tokens
from lit_grpo.objective.inputs import TokenCounts
from lit_grpo.objective.loss import TokenLosses, token_losses
from lit_grpo.types import TrainBatch

MAX_TOKENS = 11


@pytest.fixture(autouse=True, scope="module")
def double_precision():
    """Create float64 tensors by default, in every test module that imports this fixture."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def train_batch(advantages: Any, mask: Any, **fields: Any) -> TrainBatch:
    """Build completions of one prompt; sampler logprobs are 0 unless given."""
    mask = torch.as_tensor(mask, dtype=torch.bool)
    fields = {name: torch.as_tensor(value) for name, value in fields.items()}
    return TrainBatch(
        prompt_ids=torch.zeros(1, 1, dtype=torch.long),
        prompt_mask=torch.ones(1, 1, dtype=torch.bool),
        prompt_index=torch.zeros(len(mask), dtype=torch.long),
        completion_ids=torch.zeros(mask.shape, dtype=torch.long),
        completion_mask=torch.ones_like(mask),
        loss_mask=mask,
        advantages=torch.as_tensor(advantages),
        **({"sampler_logprobs": torch.zeros(mask.shape)} | fields),
    )


def counts_of(*ranks: TrainBatch) -> TokenCounts:
    """Return the counts of one minibatch for the first of these ranks."""
    return TokenCounts(
        tokens=sum(int(batch.loss_mask.sum()) for batch in ranks),
        sequences=sum(int(batch.loss_mask.any(1).sum()) for batch in ranks),
        max_tokens=MAX_TOKENS,
        local_tokens=int(ranks[0].loss_mask.sum()),
        num_ranks=len(ranks),
        entropy_tokens=sum(int(batch.surrogate_mask.sum()) for batch in ranks),
        good_tokens=sum(map(_good_tokens, ranks)),
    )


def _good_tokens(batch: TrainBatch) -> int:
    return 0 if batch.is_good is None else int((batch.loss_mask & batch.is_good[:, None]).sum())


def losses_of(
    logprobs: Any, batch: TrainBatch, objective: Objective, entropy: Any = None, **options: Any
) -> TokenLosses:
    """Return the losses of a micro-batch that is a whole minibatch."""
    logprobs = torch.as_tensor(logprobs)
    entropy = torch.zeros_like(logprobs) if entropy is None else torch.as_tensor(entropy)
    return token_losses(logprobs, entropy, batch, counts_of(batch), objective, **options)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch, and the logprobs and entropies of the policy for it."""

    logprobs: Tensor
    entropy: Tensor
    batch: TrainBatch

    def select(self, rows: Tensor) -> Case:
        return Case(
            logprobs=self.logprobs[rows], entropy=self.entropy[rows], batch=self.batch.select(rows)
        )

    def with_entropy_mask(self, fraction: float) -> Case:
        """Give a surrogate to the tokens of the highest entropy only; at 1 to all of them."""
        if fraction == 1:
            return self
        mask = self.batch.loss_mask
        threshold = entropy_threshold(self.entropy[mask], fraction)
        kept = top_entropy_tokens(self.entropy, mask, threshold)
        return replace(self, batch=replace(self.batch, entropy_mask=kept))


def random_case(
    seed: int, *, num_rows: int = 5, num_tokens: int = 6, has_old: bool = True, has_ref: bool = True
) -> Case:
    """Draw ratios around 1, a mask with holes, and sometimes a row without tokens."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows, num_tokens)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    logprobs = normal(*shape) / 2 - 2
    mask = torch.rand(shape, generator=generator) < 0.7
    mask &= torch.rand(num_rows, 1, generator=generator) < 0.9
    batch = train_batch(
        normal(num_rows),
        mask,
        sampler_logprobs=logprobs + normal(*shape) * 0.4,
        **({"old_logprobs": logprobs + normal(*shape) * 0.3} if has_old else {}),
        **({"ref_logprobs": logprobs + normal(*shape) * 0.5} if has_ref else {}),
    )
    # Values that float32 represents exactly, since TRL takes their quantile in float32.
    entropy = (torch.rand(shape, generator=generator) * 3).float().double()
    return Case(logprobs=logprobs, entropy=entropy, batch=batch)


class Gradient(NamedTuple):
    loss: Tensor
    logprobs: Tensor
    entropy: Tensor


def differentiate(case: Case, function: Any) -> Gradient:
    """Return the value of ``function(logprobs, entropy)`` and its two derivatives."""
    logprobs = case.logprobs.clone().requires_grad_()
    entropy = case.entropy.clone().requires_grad_()
    loss = function(logprobs, entropy)
    by_logprobs, by_entropy = torch.autograd.grad(
        loss + 0 * (logprobs.sum() + entropy.sum()), (logprobs, entropy)
    )
    return Gradient(loss.detach(), by_logprobs, by_entropy)


def gradient_of(case: Case, objective: Objective, counts: TokenCounts) -> Gradient:
    """Return the share of this case in a minibatch with these counts."""

    def loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
        coef = objective.entropy.coef
        return token_losses(
            logprobs, entropy, case.batch, counts, objective, entropy_coef=coef
        ).loss

    return differentiate(case, loss)


def assert_same(ours: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    for one, two in zip(ours, other, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-10)
