"""The terms of the objective: KL, distillation, entropy, corrections and masks, with settings."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

from lit_grpo.objective.custom import Function, check_arguments
from lit_grpo.types import UserError, check_range
from lit_grpo.types.field_types import check_fields
from lit_grpo.types.keywords import checks_keywords

_KEY = "model.objective."


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class KLTerm:
    """The KL divergence from the reference, and how the reference changes.

    Args:
        estimator: Estimator of the divergence of one token: ``k1``, ``k2`` or ``k3``.
        coef: Weight of the divergence (TRL: beta); at 0 no reference is loaded.
        place: ``loss`` adds it to the loss, token by token; ``reward`` subtracts its sum over a
            completion from the reward, before advantages are computed (verl: use_kl_in_reward).
        gradient: Gradient of the term in the loss: the ``estimator``'s own, or the gradient of
            ``k2`` with the value of the estimator (straight-through; verl: ``k1+``, ``k3+``). In
            expectation, k2 has the gradient of the reverse KL divergence; k1 has gradient 0.
        importance: Multiply by the ratio of the policy over the sampler, which makes the gradient
            of k3, and the gradient at off-policy tokens, unbiased (DeepSeek-V3.2,
            arXiv 2512.02556 equation 7; TRL: use_bias_correction_kl).
        target: The divergence in nats per token that ``coef`` is adapted to from one rollout step
            to the next (arXiv 1909.08593 section 2.2; verl: target_kl); null keeps it fixed.
        horizon: Number of completions over which the coefficient follows the divergence: a step of
            that many changes it by 20% at most.
        refresh_every: Number of rollout steps after which the reference moves towards the policy
            (TR-DPO, arXiv 2404.09656; TRL: ref_model_sync_steps); null keeps the reference fixed.
        refresh_mix: Share of the policy in the new reference (TRL: ref_model_mixup_alpha): 1
            copies the policy; a smaller value makes the reference a moving average.

    Raises:
        UserError: a value is out of range, or choices cannot be combined.
    """

    estimator: Literal["k1", "k2", "k3"] = "k3"
    coef: float = 0.0
    place: Literal["loss", "reward"] = "loss"
    gradient: Literal["estimator", "k2"] = "estimator"
    importance: bool = False
    target: float | None = None
    horizon: int = 10_000
    refresh_every: int | None = None
    refresh_mix: float = 1.0

    def __post_init__(self) -> None:
        check_fields(f"{_KEY}kl", self)
        key = f"{_KEY}kl."
        check_range(
            f"{key}coef",
            self.coef,
            at_least=0,
            why="a negative coefficient drives the policy away from the reference",
        )
        check_range(
            f"{key}target",
            self.target,
            above=0,
            why="the coefficient follows the divergence relative to it",
        )
        check_range(f"{key}horizon", self.horizon, at_least=1)
        if self.target is not None and self.coef == 0:
            raise UserError(
                "kl.target has no effect with kl.coef 0 (a coefficient of 0 stays 0). "
                f"Set {key}coef to its initial value, or leave target out."
            )
        check_range(
            f"{key}refresh_every",
            self.refresh_every,
            at_least=1,
            why="it counts rollout steps; null keeps the reference fixed",
        )
        check_range(
            f"{key}refresh_mix",
            self.refresh_mix,
            above=0,
            at_most=1,
            why="it is the share of the policy in the new reference",
        )
        if self.place == "reward" and (self.gradient == "k2" or self.importance):
            raise UserError(
                "kl.gradient: k2 and kl.importance have no effect with kl.place: reward (it has "
                f"no gradient). Set {key}place to loss, or leave both out."
            )
        if self.importance and self.estimator == "k2" and self.gradient == "estimator":
            raise UserError(
                "kl.importance cannot be combined with kl.estimator: k2 (k2 already has the "
                "gradient of the reverse KL divergence, and the ratio would change it). "
                f"Set {key}estimator to k3, or kl.importance to false."
            )
        if self.refresh_every is not None and self.coef == 0:
            raise UserError(
                "kl.refresh_every has no effect with kl.coef 0 (there is no reference). "
                f"Set {key}coef, or leave refresh_every out."
            )
        if self.refresh_every is None and self.refresh_mix != 1:
            raise UserError(
                f"kl.refresh_mix {self.refresh_mix} has no effect without kl.refresh_every (the "
                f"reference stays fixed). Set {key}refresh_every, or leave refresh_mix out."
            )

    @property
    def is_in_loss(self) -> bool:
        return self.coef > 0 and self.place == "loss"

    @property
    def is_in_reward(self) -> bool:
        return self.coef > 0 and self.place == "reward"


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class DistillationTerm:
    """The reverse KL divergence of the policy from a teacher, on the policy's own completions.

    Args:
        coef: Weight of the divergence; above 0 it needs ``model.teacher``.
        top_k: Compute the divergence of each token over the teacher's ``top_k`` most likely tokens
            and one class of all others, rather than estimate it from the sampled token alone.

    Raises:
        UserError: a value is out of range.
    """

    coef: float = 0.0
    top_k: int | None = None

    def __post_init__(self) -> None:
        check_fields(f"{_KEY}distillation", self)
        key = f"{_KEY}distillation."
        check_range(
            f"{key}coef",
            self.coef,
            at_least=0,
            why="a negative coefficient drives the policy away from the teacher",
        )
        check_range(f"{key}top_k", self.top_k, at_least=1, why="null uses the sampled token alone")


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class EntropyTerm:
    """The entropy bonus: ``coef`` times the mean entropy of the trained tokens.

    With a ``target`` the coefficient adapts to the entropy (Skywork-OR1, arXiv 2505.22312 equation
    3.2): while the entropy is at or below the target, the bonus is applied and its coefficient
    rises by ``coef_step`` per optimizer step; above the target, the bonus is off and its
    coefficient falls.

    Args:
        coef: Weight of the bonus; with a target, its initial value.
        target: Target entropy in nats per token; null keeps the coefficient fixed.
        coef_step: Change of the coefficient per optimizer step.
        coef_min: Lower bound of the coefficient.
        coef_max: Upper bound of the coefficient.

    Raises:
        UserError: a value is out of range.
    """

    coef: float = 0.0
    target: float | None = None
    coef_step: float = 0.005
    coef_min: float = 0.0
    coef_max: float = 1.0

    def __post_init__(self) -> None:
        check_fields(f"{_KEY}entropy", self)
        key = f"{_KEY}entropy."
        check_range(f"{key}coef", self.coef)
        check_range(f"{key}target", self.target)
        if self.target is None:
            return
        check_range(f"{key}coef_max", self.coef_max, at_least=self.coef_min)
        check_range(
            f"{key}coef",
            self.coef,
            at_least=self.coef_min,
            at_most=self.coef_max,
            why="with a target the coefficient stays between coef_min and coef_max",
        )
        check_range(
            f"{key}coef_step",
            self.coef_step,
            above=0,
            why="at 0 the coefficient could not follow the target",
        )


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class SamplerCorrection:
    """Importance weights of the old policy over the sampler, which multiply the surrogate.

    They correct for the different kernels, and possibly older weights, that the sampler uses.

    Args:
        level: One weight per ``token``; one per ``sequence``, the product of its tokens' ratios;
            or their ``geometric`` mean (length-normalised in arXiv 2507.18071). Or your own
            function (in a config: its import path), which gets the [N, C] logarithms of old policy
            over sampler and the [N, C] mask, and returns the logarithms of the weights, [N, C] or
            [N, 1].
        outside: Set a weight that is out of bounds to the bound (``truncate``, arXiv 1802.01561),
            or to 0 (``mask``), which removes the token or sequence from the surrogate.
        min_ratio: Lower bound of the weight; null for none.
        max_ratio: Upper bound of the weight; null for none.

    Raises:
        UserError: no ratio lies within the bounds.
    """

    level: Literal["token", "sequence", "geometric"] | Function = "token"
    outside: Literal["truncate", "mask"] = "truncate"
    min_ratio: float | None = None
    max_ratio: float | None = 2.0

    def __post_init__(self) -> None:
        check_fields(f"{_KEY}sampler_correction", self)
        key = f"{_KEY}sampler_correction."
        check_arguments(f"{key}level", self.level, "log_ratio", "mask")
        why = "the bounds must satisfy 0 <= min_ratio < max_ratio"
        check_range(f"{key}min_ratio", self.min_ratio, at_least=0, why=why)
        check_range(f"{key}max_ratio", self.max_ratio, above=self.min_ratio or 0, why=why)


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class SamplerMask:
    """Remove the surrogate of tokens or sequences on which policy and sampler differ too much.

    Unlike the `SamplerCorrection` it does not weight what it keeps.

    Args:
        statistic: What is compared with the bounds: the ``ratio`` of the old policy over the
            sampler; ``k2``, half the square of its logarithm; or ``k3``, ratio - 1 - logarithm.
        over: Each ``token`` by itself; or the ``sum``, ``mean`` or ``maximum`` over the tokens of a
            sequence, which is masked as a whole. For ``ratio``, sum and mean are taken of its
            logarithm: the ratio of the sequence, and the geometric mean.
        min: Lower bound; null for none.
        max: Upper bound; null for none.

    Raises:
        UserError: nothing, or everything, lies within the bounds.
    """

    statistic: Literal["ratio", "k2", "k3"] = "ratio"
    over: Literal["token", "sum", "mean", "maximum"] = "mean"
    min: float | None = None
    max: float | None = None

    def __post_init__(self) -> None:
        check_fields(f"{_KEY}sampler_masks", self)
        key = f"{_KEY}sampler_masks."
        why = "the bounds must satisfy 0 <= min < max"
        check_range(f"{key}min", self.min, at_least=0, why=why)
        check_range(f"{key}max", self.max, above=self.min or 0, why=why)
        if self.min is None and self.max is None:
            raise UserError(
                "sampler_masks needs a bound, got none (it would mask nothing). Set "
                f"{key}max, for example to 2 for a ratio."
            )
        if self.min is not None and self.statistic != "ratio":
            raise UserError(
                f"sampler_masks.min needs statistic: ratio, got {self.statistic} (it is 0 where "
                f"policy and sampler agree). Set {key}min to null."
            )

    @property
    def bounds(self) -> tuple[float, float]:
        return self.min or 0.0, inf if self.max is None else self.max


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class CovarianceTerm:
    """Treatment of the tokens that lower the entropy most (arXiv 2505.22617).

    Those are the ones with the highest covariance: the product of logprob and advantage, each minus
    its mean over the tokens of the rollout step.

    Args:
        action: ``clip`` removes the surrogate of tokens that are drawn from those whose covariance
            lies between ``low`` and ``high`` (Clip-Cov). ``kl`` adds the absolute log ratio of
            policy over old policy to the loss of those with the highest covariance (KL-Cov).
        fraction: Share of all tokens that this is done to.
        low: Lower bound of the covariance, for ``clip``.
        high: Upper bound of the covariance, for ``clip``.
        coef: Weight of the log ratio, for ``kl``.

    Raises:
        UserError: a value is out of range.
    """

    action: Literal["clip", "kl"] = "clip"
    fraction: float = 2e-4
    low: float = 1.0
    high: float = 5.0
    coef: float = 1.0

    def __post_init__(self) -> None:
        check_fields(f"{_KEY}covariance", self)
        key = f"{_KEY}covariance."
        check_range(f"{key}fraction", self.fraction, above=0, at_most=1)
        check_range(f"{key}high", self.high, above=self.low)
        check_range(f"{key}coef", self.coef, above=0)


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class SFTTerm:
    """The negative log likelihood of good completions (VAPO, arXiv 2504.05118 equation 8).

    Args:
        coef: Weight of the mean over their tokens; 0 for none (0.1 in VAPO).
        min_reward: A completion is good if its reward is at least this.

    Raises:
        UserError: a value is out of range.
    """

    coef: float = 0.0
    min_reward: float = 1.0

    def __post_init__(self) -> None:
        check_fields(f"{_KEY}sft", self)
        check_range(f"{_KEY}sft.coef", self.coef, at_least=0)
        check_range(f"{_KEY}sft.min_reward", self.min_reward)
