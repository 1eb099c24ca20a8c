"""Estimators of the divergence of the policy from its reference, one value a token.

Source of all three: J. Schulman, Approximating KL Divergence (2020).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lit_grpo.objective.config import KLTerm


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """``log(pi / ref)``: unbiased in value; differentiated in a loss its expected gradient is 0."""
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


def straight_through_k2(value: Tensor, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """[N, C] the given value with the gradient of `k2`.

    Source: that an estimator's gradient is not that of the divergence, Tang and Munos, arXiv
    2506.09477; that k2's is, REINFORCE++, arXiv 2501.03262 appendix B.1.
    """
    gradient = k2(logprobs, ref_logprobs)
    return value.detach() + gradient - gradient.detach()


def kl_in_loss(logprobs: Tensor, ref_logprobs: Tensor, ratio: Tensor, term: KLTerm) -> Tensor:
    """[N, C] the term that is added to the surrogate, before its coefficient.

    The ratio's own gradient is what the estimators lack and k2's gradient has: beside that one it
    would count the divergence twice.
    """
    kl = KL_ESTIMATORS[term.estimator](logprobs, ref_logprobs)
    if term.gradient == "k2":
        kl, ratio = straight_through_k2(kl, logprobs, ref_logprobs), ratio.detach()
    return kl * ratio if term.importance else kl


def kl_in_reward(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, term: KLTerm) -> Tensor:
    """[N] what is taken off each completion's reward: ``coef`` times the sum over its tokens.

    Source: InstructGPT, arXiv 2203.02155 equation 2; REINFORCE++, arXiv 2501.03262 equation 4,
    where each token answers for the divergence from itself on.
    """
    return term.coef * (KL_ESTIMATORS[term.estimator](logprobs, ref_logprobs) * mask).sum(1)
