"""The reverse KL divergence of the policy from a teacher, on the policy's own completions.

Source: on-policy distillation, GKD, arXiv 2306.13649 equation 3 with reverse KL and only the
student's own completions; by policy gradient MiniLLM, arXiv 2306.08543 section 2.2.
"""

from __future__ import annotations

from torch import Tensor

from lit_grpo.objective.kl import kl_in_loss
from lit_grpo.objective.ratios import bounded
from lit_grpo.objective.terms import KLTerm

_SAMPLED = KLTerm(coef=1.0, estimator="k1", gradient="k2", importance=True)

MIN_REMAINDER = 1e-7
"""Least probability of all tokens but the teacher's most likely ones, which keeps its logarithm
finite: about the rounding error of float32."""

MIN_LOGPROB = -1e30
"""Finite logprob of a token that is impossible."""


def sampled_divergence(
    logprobs: Tensor, teacher_logprobs: Tensor, sampler_logprobs: Tensor
) -> Tensor:
    """Return [N, C] estimates of the divergence from the sampled tokens.

    The value is ``log(pi / teacher)``, bounded. The gradient is the divergence's gradient: the
    value times the gradient of the logprob. Both are multiplied by the ratio of the policy over the
    sampler. The part of the gradient through later tokens is left out.
    """
    log_ratio = bounded(logprobs.detach() - teacher_logprobs)
    return kl_in_loss(logprobs, logprobs.detach() - log_ratio, sampler_logprobs, _SAMPLED)


def top_divergence(logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """Return [N, C] divergences over K tokens and one class of all others.

    This is at most the divergence over the whole vocabulary, and equal to it if K is the whole
    vocabulary. No estimate is involved, so no ratio is needed.

    Args:
        logprobs: [N, C, K] of the teacher's most likely tokens under the policy.
        teacher_logprobs: [N, C, K] of the same tokens under the teacher.
    """
    teacher_logprobs = teacher_logprobs.clamp(min=MIN_LOGPROB)
    log_ratio = bounded(logprobs - teacher_logprobs)
    rest, teacher_rest = _remainder(logprobs), _remainder(teacher_logprobs)
    return (logprobs.exp() * log_ratio).sum(-1) + rest * bounded(rest.log() - teacher_rest.log())


def _remainder(logprobs: Tensor) -> Tensor:
    """Return [N, C] the probability of all tokens but these."""
    return (1 - logprobs.exp().sum(-1)).clamp(min=MIN_REMAINDER)
