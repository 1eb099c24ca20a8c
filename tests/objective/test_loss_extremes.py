"""Loss and gradient are finite for any finite logprobs, with every registered choice."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, get_args, get_type_hints

import pytest
import torch
from loss_batches import counts_of

from lit_grpo.objective import (
    CovarianceTerm,
    DistillationTerm,
    KLTerm,
    Objective,
    SamplerCorrection,
    SamplerMask,
    SFTTerm,
)
from lit_grpo.objective.aggregations import AGGREGATIONS
from lit_grpo.objective.corrections import LEVELS, OUTSIDE, OVER, STATISTICS
from lit_grpo.objective.kl import KL_ESTIMATORS, kl_in_reward
from lit_grpo.objective.loss import token_losses
from lit_grpo.objective.ratios import MAX_LOG_RATIO, RATIOS, bounded, token_ratio
from lit_grpo.objective.surrogates import DIVERGENCES, SURROGATES
from lit_grpo.types import TrainBatch, UserError

NATS = (20.0, 90.0, 300.0)
NUM_TOKENS = 60
"""The bound on a ratio holds for sums over a row as well."""


def valid(kind: type, choices: dict[str, Any]) -> list[Any]:
    """Return all combinations of the choices that are not refused."""
    made = []
    for values in product(*choices.values()):
        try:
            made.append(kind(**dict(zip(choices, values, strict=True))))
        except UserError:
            continue
    return made


CORRECTIONS = valid(
    SamplerCorrection, {"level": LEVELS, "outside": OUTSIDE, "max_ratio": (None, 2.0)}
)
KL_TERMS = valid(
    KLTerm,
    {
        "coef": [0.1],
        "estimator": KL_ESTIMATORS,
        "gradient": get_args(get_type_hints(KLTerm)["gradient"]),
        "importance": (False, True),
    },
)
SAMPLER_MASKS = valid(
    SamplerMask, {"statistic": STATISTICS, "over": OVER, "min": (None, 0.5), "max": (None, 2.0)}
)
COVARIANCES = valid(CovarianceTerm, {"action": get_args(get_type_hints(CovarianceTerm)["action"])})
OBJECTIVES = [
    *valid(
        Objective,
        {
            "surrogate": SURROGATES,
            "ratio": RATIOS,
            "ratio_cap": (None, 3.0),
            "sampler_correction": [None, *CORRECTIONS],
        },
    ),
    *valid(Objective, {"surrogate": SURROGATES, "kl": KL_TERMS, "aggregation": AGGREGATIONS}),
    *valid(Objective, {"off_policy_threshold": (0.1,), "ratio": RATIOS}),
    *valid(Objective, {"surrogate": ["dppo"], "dppo_divergence": DIVERGENCES}),
    *valid(Objective, {"surrogate": SURROGATES, "old_logprobs": ("policy", "sampler")}),
    *valid(Objective, {"sampler_masks": [[mask] for mask in SAMPLER_MASKS], "ratio": RATIOS}),
    *valid(Objective, {"covariance": COVARIANCES, "sft": [SFTTerm(), SFTTerm(coef=0.1)]}),
]


def batch_with(nats: float, dtype: torch.dtype) -> tuple[torch.Tensor, TrainBatch]:
    """Return logprobs and a batch in which old policy, reference and sampler are so far from them.

    Each is once more and once less likely, where the advantage is positive, negative and 0.
    """
    signs = list(product((1.0, -1.0), repeat=3))
    logprobs, old, ref, sampler, advantages = [], [], [], [], []
    for (old_sign, ref_sign, sampler_sign), advantage in product(signs, (1.0, -1.0, 0.0)):
        logprobs.append(-400.0)
        old.append(-400.0 + old_sign * nats)
        ref.append(-400.0 + ref_sign * nats)
        sampler.append(old[-1] + sampler_sign * nats)
        advantages.append(advantage)

    def of(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)[:, None].repeat(1, NUM_TOKENS)

    rows = len(logprobs)
    ones = torch.ones(rows, NUM_TOKENS, dtype=torch.bool)
    batch = TrainBatch(
        prompt_ids=torch.ones(1, 1, dtype=torch.long),
        prompt_mask=torch.ones(1, 1, dtype=torch.bool),
        prompt_index=torch.zeros(rows, dtype=torch.long),
        completion_ids=torch.ones(rows, NUM_TOKENS, dtype=torch.long),
        completion_mask=ones,
        loss_mask=ones,
        advantages=torch.tensor(advantages),
        sampler_logprobs=of(sampler),
        old_logprobs=of(old),
        ref_logprobs=of(ref),
        is_good=torch.tensor(advantages) > 0,
        covariance_mask=torch.arange(rows * NUM_TOKENS).view(rows, -1) % 2 == 0,
    )
    return of(logprobs).requires_grad_(), batch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "nats", [*(pytest.param(one, marks=pytest.mark.slow) for one in NATS[:-1]), NATS[-1]]
)
def test_loss_and_gradient_are_finite(nats, dtype):
    for objective in OBJECTIVES:
        logprobs, batch = batch_with(nats, dtype)
        losses = token_losses(
            logprobs, torch.zeros_like(logprobs), batch, counts_of(batch), objective
        )
        assert losses.loss.isfinite(), objective
        losses.loss.backward()
        assert logprobs.grad.isfinite().all(), objective


TEACHERS = [
    Objective(surrogate=surrogate, distillation=DistillationTerm(coef=1.0, top_k=top_k))
    for surrogate in SURROGATES
    for top_k in (None, 2, 4)
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nats", NATS)
def test_loss_and_gradient_are_finite_with_a_teacher(nats, dtype):
    """With top_k, policy and teacher are each sure of one of the tokens, of another or of none."""
    for objective in TEACHERS:
        logprobs, batch = batch_with(nats, dtype)
        k = objective.distillation.top_k
        candidates = None if k is None else certain(k, nats, logprobs).requires_grad_()
        teacher = batch.ref_logprobs if k is None else certain(k, nats, logprobs).flip(0)
        batch = replace(batch, ref_logprobs=None, teacher_logprobs=teacher)
        losses = token_losses(
            logprobs,
            torch.zeros_like(logprobs),
            batch,
            counts_of(batch),
            objective,
            candidate_logprobs=candidates,
        )
        assert losses.loss.isfinite(), objective
        losses.loss.backward()
        assert logprobs.grad.isfinite().all(), objective
        assert candidates is None or candidates.grad.isfinite().all(), objective


def certain(k: int, nats: float, like: torch.Tensor) -> torch.Tensor:
    """Return [N, C, k] logprobs, 0 for one of k + 1 tokens and so many nats below for others."""
    sure = torch.arange(len(like))[:, None] % (k + 1) == torch.arange(k)
    values = torch.where(sure, 0.0, -nats).to(like.dtype)
    return values[:, None].repeat(1, like.shape[1], 1)


@pytest.mark.parametrize("nats", NATS)
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_the_penalty_on_a_reward_is_finite(nats, estimator):
    logprobs, batch = batch_with(nats, torch.float32)
    term = KLTerm(coef=0.1, estimator=estimator, place="reward")
    penalty = kl_in_reward(logprobs.detach(), batch.ref_logprobs, batch.loss_mask, term)
    assert penalty.isfinite().all()


def test_within_the_bound_a_ratio_is_exact_and_beyond_it_constant():
    nats = torch.tensor([0.5, MAX_LOG_RATIO - 1, MAX_LOG_RATIO + 5], dtype=torch.float64)
    log_ratio = nats[None].clone().requires_grad_()
    ratio = token_ratio(bounded(log_ratio), torch.ones(1, 3, dtype=torch.bool))
    ratio.sum().backward()
    expected = nats.detach().clamp(max=MAX_LOG_RATIO).exp()
    torch.testing.assert_close(ratio.detach()[0], expected, rtol=1e-12, atol=0)
    gradient = expected * torch.tensor([1.0, 1.0, 0.0])
    torch.testing.assert_close(log_ratio.grad[0], gradient, rtol=1e-12, atol=0)
