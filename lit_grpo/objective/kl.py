"""Estimators of the KL divergence of the policy from the reference, one value per token.

Source of all three: J. Schulman, Approximating KL Divergence (2020). To add an estimator: write a
function, add it to ``KL_ESTIMATORS``, and add its name to ``KLTerm.estimator`` in `terms`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from lit_grpo.objective.ratios import MAX_LOG_RATIO, bounded
from lit_grpo.objective.terms import KLTerm


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return ``log(pi / ref)``: unbiased, but its gradient in a loss is 0 in expectation."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return ``log(pi / ref)^2 / 2``: biased, but with the gradient of the reverse KL."""
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


def kl_in_loss(
    logprobs: Tensor, ref_logprobs: Tensor, sampler_logprobs: Tensor, term: KLTerm
) -> Tensor:
    """Return the KL term of the loss per token, [N, C], before multiplying by the coefficient.

    With ``importance``, the estimator is multiplied by the ratio of the policy over the sampler,
    from which the tokens come. The gradient then also flows through the ratio, except with
    ``gradient: k2``, which already has the gradient of the divergence.
    """
    kl = KL_ESTIMATORS[term.estimator](logprobs, ref_logprobs)
    if term.gradient == "k2":
        kl = straight_through_k2(kl, logprobs, ref_logprobs)
    if not term.importance:
        return kl
    ratio = bounded(logprobs - sampler_logprobs).exp()
    return kl * (ratio.detach() if term.gradient == "k2" else ratio)


def kl_in_reward(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, term: KLTerm) -> Tensor:
    """Return [N, C] the divergence at each token, 0 outside the mask.

    Its sum is subtracted from the reward of a completion (InstructGPT, arXiv 2203.02155 equation
    2), or, with ``advantage.discount``, the part from each token on (REINFORCE++, arXiv 2501.03262
    equation 4).
    """
    return KL_ESTIMATORS[term.estimator](logprobs, ref_logprobs) * mask


@dataclass(frozen=True, slots=True, kw_only=True)
class KLControl:
    """The coefficient of the KL term, which can adapt to the divergence.

    Source: arXiv 1909.08593 section 2.2, with a bound of 0.2 on the relative error.
    """

    term: KLTerm
    coef: float

    def after_step(self, divergence: float, num_rows: int) -> KLControl:
        """Return the state after a rollout step.

        Args:
            divergence: Its mean, in nats per token.
            num_rows: Its completions.
        """
        if self.term.target is None:
            return self
        error = min(max(divergence / self.term.target - 1, -0.2), 0.2)
        return replace(self, coef=self.coef * (1 + error * num_rows / self.term.horizon))
