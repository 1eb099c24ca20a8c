"""Estimators of the KL divergence of the policy from the reference, one value per token.

Source of all three: J. Schulman, Approximating KL Divergence (2020). To add an estimator: write a
function, add it to ``KL_ESTIMATORS``, and add its name to ``KLTerm.estimator``.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lit_grpo.objective.config import KLTerm
from lit_grpo.objective.ratios import MAX_LOG_RATIO


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return ``log(pi / ref)``: unbiased, but its gradient in a loss is 0 in expectation."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return ``log(pi / ref)^2 / 2``: biased, but its gradient is that of the reverse KL."""
    return (logprobs - ref_logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return ``ref / pi - log(ref / pi) - 1``: unbiased and never negative.

    Where the reference is more likely by more than `MAX_LOG_RATIO`, it is constant.

    Source: GRPO, arXiv 2402.03300 equation 4.
    """
    log_ratio = (ref_logprobs - logprobs).clamp(max=MAX_LOG_RATIO)
    return log_ratio.exp() - log_ratio - 1


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def straight_through_k2(value: Tensor, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return [N, C] the given value with the gradient of `k2`.

    Source: in general the gradient of an estimator is not the gradient of the divergence (Tang and
    Munos, arXiv 2506.09477); for k2 it is (REINFORCE++, arXiv 2501.03262 appendix B.1).
    """
    gradient = k2(logprobs, ref_logprobs)
    return value.detach() + gradient - gradient.detach()


def kl_in_loss(logprobs: Tensor, ref_logprobs: Tensor, ratio: Tensor, term: KLTerm) -> Tensor:
    """Return the KL term of the loss per token, [N, C], before multiplying by ``coef``.

    With ``importance``, the estimator is multiplied by the ratio. The gradient then also flows
    through the ratio, except with ``gradient: k2``, whose gradient is already that of the
    divergence.
    """
    kl = KL_ESTIMATORS[term.estimator](logprobs, ref_logprobs)
    if term.gradient == "k2":
        kl, ratio = straight_through_k2(kl, logprobs, ref_logprobs), ratio.detach()
    return kl * ratio if term.importance else kl


def kl_in_reward(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, term: KLTerm) -> Tensor:
    """Return [N] the penalty on each completion's reward: ``coef`` times the sum over its tokens.

    Source: InstructGPT, arXiv 2203.02155 equation 2. REINFORCE++, arXiv 2501.03262 equation 4,
    instead penalises each token by the sum from that token on.
    """
    return term.coef * (KL_ESTIMATORS[term.estimator](logprobs, ref_logprobs) * mask).sum(1)
