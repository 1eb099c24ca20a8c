"""The settings of the objective: independent choices that compose.

Each choice names a function in a table of this package. Combinations that cannot work are refused
when the config is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from typing import Literal

from lit_grpo.types import UserError, check_range

_KEY = "model.objective."


@dataclass(frozen=True, kw_only=True)
class KLTerm:
    """The KL divergence from the reference, and how the reference changes.

    Args:
        estimator: Estimator of the divergence of one token: ``k1``, ``k2`` or ``k3``.
        coef: Weight of the divergence (TRL: beta); at 0 no reference is loaded.
        place: ``loss`` adds it to the loss, token by token; ``reward`` subtracts its sum over a
            completion from the reward, before advantages are computed (verl: use_kl_in_reward).
        gradient: Gradient of the term in the loss: that of the ``estimator``, or that of ``k2``
            with the value of the estimator (straight-through; verl: ``k1+``, ``k3+``). In
            expectation, k2 has the gradient of the reverse KL divergence; k1 has gradient 0.
        importance: Multiply by the policy ratio, which makes the gradient of k3, and that of
            off-policy tokens, unbiased (DeepSeek-V3.2, arXiv 2512.02556 equation 7; TRL:
            use_bias_correction_kl).
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
    refresh_every: int | None = None
    refresh_mix: float = 1.0

    def __post_init__(self) -> None:
        key = f"{_KEY}kl."
        check_range(
            f"{key}coef",
            self.coef,
            at_least=0,
            why="a negative coefficient drives the policy away from the reference",
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


@dataclass(frozen=True, kw_only=True)
class SamplerCorrection:
    """Importance weights of the old policy over the sampler, which multiply the surrogate.

    They correct for the different kernels, and possibly older weights, that the sampler uses.

    Args:
        level: One weight per ``token``; one per ``sequence``, the product of its tokens' ratios;
            or their ``geometric`` mean (length-normalised in arXiv 2507.18071).
        outside: Set a weight that is out of bounds to the bound (``truncate``, arXiv 1802.01561),
            or to 0 (``mask``), which removes the token or sequence from the surrogate.
        min_ratio: Lower bound of the weight; null for none.
        max_ratio: Upper bound of the weight; null for none.

    Raises:
        UserError: no ratio lies within the bounds.
    """

    level: Literal["token", "sequence", "geometric"] = "token"
    outside: Literal["truncate", "mask"] = "truncate"
    min_ratio: float | None = None
    max_ratio: float | None = 2.0

    def __post_init__(self) -> None:
        key = f"{_KEY}sampler_correction."
        why = "the bounds must satisfy 0 <= min_ratio < max_ratio"
        check_range(f"{key}min_ratio", self.min_ratio, at_least=0, why=why)
        check_range(f"{key}max_ratio", self.max_ratio, above=self.min_ratio or 0, why=why)


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What an optimizer step minimises.

    Args:
        surrogate: How ratio and advantage become a loss: PPO's ``clip``, ``cispo`` (MiniMax-M1),
            ``sapo``, ``gmpo`` or ``vespo``.
        ratio: Ratio of the current over the old policy: one per ``token``, or one per
            ``sequence``, the geometric mean of its tokens' ratios (GSPO; TRL:
            importance_sampling_level).
        clip_low: The lower bound of the ratio is ``1 - clip_low`` (TRL: epsilon); for ``gmpo`` that
            of its logarithm is ``-clip_low``.
        clip_high: The upper bound of the ratio is ``1 + clip_high`` (0.28 in DAPO,
            "clip-higher"; TRL: epsilon_high); for ``gmpo`` that of its logarithm is ``clip_high``.
        ratio_cap: Upper bound of the ratio where the advantage is negative, which ``clip`` alone
            leaves unbounded: delta of the two-sided clip (TRL: delta), c of dual clip (verl:
            clip_ratio_c). Null for none.
        sapo_temperatures: Temperatures of the ``sapo`` gate where the advantage is positive, and
            elsewhere.
        vespo_positive: k and lambda of the ``vespo`` weight where the advantage is not negative.
        vespo_negative: k and lambda of the ``vespo`` weight where the advantage is negative.
        aggregation: Weights of the tokens: equal over the mini-batch (``token``, DAPO) or per rank
            (``local_token``); equal per ``sequence`` (GRPO); ``1 / sequences``
            (``sequence_sum``, LUSPO); ``1 / (sequences * max_tokens)`` (``constant``, Dr. GRPO).
        kl: KL divergence from the reference.
        entropy: Entropy bonus.
        sampler_correction: Importance weights against the sampler; null for none.
        off_policy_threshold: Drop sequences with a negative advantage from the surrogate if the
            mean of ``log(sampler / policy)`` over their tokens is above this (TRL:
            off_policy_mask_threshold); null keeps all.
        top_entropy_fraction: Apply the surrogate and the entropy bonus only to this share of the
            tokens, those with the highest entropy (arXiv 2506.01939 section 5; TRL:
            top_entropy_quantile). Below 1 this costs a forward pass if there is one optimizer step
            per rollout step.
        overlong_filtering: Exclude completions that hit ``max_tokens`` from the loss (TRL:
            mask_truncated_completions).

    Raises:
        UserError: a value is out of range, or choices cannot be combined.
    """

    surrogate: Literal["clip", "cispo", "sapo", "gmpo", "vespo"] = "clip"
    ratio: Literal["token", "sequence"] = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    ratio_cap: float | None = None
    sapo_temperatures: tuple[float, float] = (1.0, 1.05)
    vespo_positive: tuple[float, float] = (2.0, 3.0)
    vespo_negative: tuple[float, float] = (3.0, 2.0)
    aggregation: Literal["token", "local_token", "sequence", "sequence_sum", "constant"] = "token"
    kl: KLTerm = KLTerm()
    entropy: EntropyTerm = EntropyTerm()
    sampler_correction: SamplerCorrection | None = SamplerCorrection()
    off_policy_threshold: float | None = None
    top_entropy_fraction: float = 1.0
    overlong_filtering: bool = False

    def __post_init__(self) -> None:
        self._check_ranges()
        if self.ratio_cap is not None and self.surrogate != "clip":
            raise UserError(
                f"ratio_cap needs surrogate: clip, got {self.surrogate} (which bounds its ratio "
                f"in its own way). Set {_KEY}surrogate to clip, or leave ratio_cap out."
            )
        if self.ratio == "sequence" and self.surrogate in ("gmpo", "vespo"):
            raise UserError(
                f"surrogate: {self.surrogate} needs ratio: token, got sequence (it combines the "
                f"ratios of a sequence itself). Set {_KEY}ratio to token."
            )
        is_geometric = self.sampler_correction and self.sampler_correction.level == "geometric"
        if self.surrogate == "vespo" and is_geometric:
            raise UserError(
                "surrogate: vespo cannot be combined with sampler_correction.level: geometric "
                "(it needs the product of the tokens' ratios, not their mean). "
                f"Set {_KEY}sampler_correction.level to token or sequence."
            )

    def _check_ranges(self) -> None:
        check_range(
            f"{_KEY}clip_low",
            self.clip_low,
            at_least=0,
            at_most=None if self.surrogate == "gmpo" else 1,
            why="the lower bound of the ratio is 1 - clip_low",
        )
        check_range(
            f"{_KEY}clip_high",
            self.clip_high,
            at_least=0,
            why="the upper bound of the ratio is 1 + clip_high",
        )
        check_range(
            f"{_KEY}ratio_cap",
            self.ratio_cap,
            above=1 + self.clip_high,
            why="otherwise the clip would have no effect",
        )
        for name in ("sapo_temperatures", "vespo_positive", "vespo_negative"):
            for value in getattr(self, name):
                check_range(f"{_KEY}{name}", value, above=0)
        check_range(
            f"{_KEY}off_policy_threshold",
            self.off_policy_threshold,
            above=0,
            why="at 0, rounding errors alone would drop sequences; null keeps all",
        )
        check_range(
            f"{_KEY}top_entropy_fraction",
            self.top_entropy_fraction,
            above=0,
            at_most=1,
            why="it is the share of tokens that have a surrogate",
        )

    @property
    def ratio_bounds(self) -> tuple[float, float]:
        """The ratios at which ``clip`` and ``gmpo`` cut off the gradient."""
        if self.surrogate == "gmpo":
            return exp(-self.clip_low), exp(self.clip_high)
        return 1 - self.clip_low, 1 + self.clip_high

    @property
    def has_gradient_at_zero_advantage(self) -> bool:
        """Whether a row with advantage 0 can have a gradient."""
        has_bonus = self.entropy.coef != 0 or self.entropy.target is not None
        return has_bonus or self.kl.is_in_loss
