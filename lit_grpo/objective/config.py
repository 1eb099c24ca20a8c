"""What an optimizer step minimises, as the config says it: independent choices that compose.

Each choice names a function of a table beside this file. Impossible combinations are refused here,
when the config is read. Nothing here computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from typing import Literal

from lit_grpo.types import UserError


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise UserError(message)


@dataclass(frozen=True, kw_only=True)
class KLTerm:
    """The divergence from the reference, and what the reference is.

    Args:
        estimator: A key of ``KL_ESTIMATORS``.
        coef: Weight of the divergence; at 0 no reference is loaded.
        place: ``loss`` differentiates it, token by token; ``reward`` takes its sum over a
            completion off the reward, before the advantages.
        gradient: Of the ``estimator``, or that of ``k2`` under the estimator's value
            (straight-through): k2's expected gradient is the reverse KL's, k1's is 0.
        importance: Multiply by the ratio, which unbiases the gradient of k3 and of off-policy
            tokens (DeepSeek-V3.2, arXiv 2512.02556 equation 7).
        refresh_every: Rollout steps after which the reference moves towards the policy
            (TR-DPO, arXiv 2404.09656); null keeps it where it was.
        refresh_mix: The policy's share in the new reference: 1 copies it, less is a moving
            average.

    Raises:
        ValueError: a value out of range, or choices that contradict each other.
    """

    estimator: Literal["k1", "k2", "k3"] = "k3"
    coef: float = 0.0
    place: Literal["loss", "reward"] = "loss"
    gradient: Literal["estimator", "k2"] = "estimator"
    importance: bool = False
    refresh_every: int | None = None
    refresh_mix: float = 1.0

    def __post_init__(self) -> None:
        _require(
            self.coef >= 0,
            f"kl.coef must be >= 0, got {self.coef} (a negative one drives the policy away from "
            "the reference). Set model.objective.kl.coef.",
        )
        _require(
            self.place == "loss" or (self.gradient == "estimator" and not self.importance),
            "kl.place: reward has no gradient of its own, so kl.gradient: k2 and kl.importance "
            "would do nothing. Set model.objective.kl.place to loss, or leave both out.",
        )
        _require(
            not (self.importance and self.estimator == "k2" and self.gradient == "estimator"),
            "kl.importance gives k2, whose gradient is the reverse KL's already, another one. "
            "Set model.objective.kl.estimator to k3, or kl.importance to false.",
        )
        _require(
            self.refresh_every is None or self.refresh_every >= 1,
            f"kl.refresh_every must be >= 1 rollout steps or null, got {self.refresh_every}. "
            "Set model.objective.kl.refresh_every.",
        )
        _require(
            self.refresh_every is None or self.coef > 0,
            "kl.refresh_every refreshes a reference, and with kl.coef 0 there is none. "
            "Set model.objective.kl.coef, or leave refresh_every out.",
        )
        _require(
            self.refresh_every is not None or self.refresh_mix == 1,
            f"kl.refresh_mix {self.refresh_mix} does nothing to a reference that stays where it "
            "was. Set model.objective.kl.refresh_every, or leave refresh_mix out.",
        )
        _require(
            0 < self.refresh_mix <= 1,
            f"kl.refresh_mix must lie in (0, 1], got {self.refresh_mix} (it is the policy's share "
            "in the new reference). Set model.objective.kl.refresh_mix.",
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

    With a ``target`` the coefficient follows the entropy (Skywork-OR1, arXiv 2505.22312 equation
    3.2): it rises by ``coef_step`` an optimizer step while the entropy is at or below the target,
    falls otherwise, and is applied only while at or below.

    Args:
        coef: Weight of the bonus; with a target, the first one.
        target: Nats a token; null keeps the coefficient as it is.
        coef_step: Change of the coefficient an optimizer step.
        coef_min: The coefficient stays at or above this.
        coef_max: The coefficient stays at or below this.

    Raises:
        ValueError: bounds that leave the coefficient no room.
    """

    coef: float = 0.0
    target: float | None = None
    coef_step: float = 0.005
    coef_min: float = 0.0
    coef_max: float = 1.0

    def __post_init__(self) -> None:
        _require(
            self.target is None or self.coef_min <= self.coef <= self.coef_max,
            f"entropy.coef must lie in [coef_min, coef_max], got {self.coef} and "
            f"[{self.coef_min}, {self.coef_max}]. Set model.objective.entropy.coef_max.",
        )
        _require(
            self.target is None or self.coef_step > 0,
            f"entropy.coef_step must be > 0, got {self.coef_step} (the coefficient could not "
            "follow the target). Set model.objective.entropy.coef_step.",
        )


@dataclass(frozen=True, kw_only=True)
class SamplerCorrection:
    """Importance weights of the trainer's old policy over the sampler, which multiply the
    surrogate: the two compute the same weights with other kernels, or other weights.

    Args:
        level: One weight a ``token``; one a ``sequence``, the product of its tokens' ratios; or
            their ``geometric`` mean (arXiv 2507.18071 calls it length-normalised).
        outside: A weight out of bounds is set to the bound (``truncate``, arXiv 1802.01561) or
            to 0 (``mask``, which drops the token or sequence from the surrogate).
        min_ratio: Lower bound; null for none.
        max_ratio: Upper bound; null for none.

    Raises:
        ValueError: bounds that no ratio meets.
    """

    level: Literal["token", "sequence", "geometric"] = "token"
    outside: Literal["truncate", "mask"] = "truncate"
    min_ratio: float | None = None
    max_ratio: float | None = 2.0

    def __post_init__(self) -> None:
        low, high = self.min_ratio or 0.0, self.max_ratio
        _require(
            low >= 0 and (high is None or high > max(low, 0.0)),
            "sampler_correction needs 0 <= min_ratio < max_ratio, got "
            f"{self.min_ratio} and {self.max_ratio} (they bound a ratio of probabilities). "
            "Set model.objective.sampler_correction.",
        )


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What an optimizer step minimises.

    Args:
        surrogate: How ratio and advantage become a loss; a key of ``SURROGATES``.
        ratio: Of the current over the old policy: one a ``token``, or one a ``sequence``, the
            geometric mean of its tokens' (GSPO).
        clip_low: The ratio's lower bound is ``1 - clip_low``; for ``gmpo`` its logarithm's is
            ``-clip_low``.
        clip_high: Its upper bound is ``1 + clip_high`` (0.28 in DAPO, "clip-higher"); for
            ``gmpo`` its logarithm's is ``clip_high``.
        ratio_cap: Upper bound of the ratio where the advantage is negative and ``clip`` has none:
            the two-sided clip's delta, dual clip's c. Null for none.
        sapo_temperatures: Of ``sapo``'s gate where the advantage is positive, and elsewhere.
        vespo_positive: k and lambda of ``vespo``'s weight where the advantage is not negative.
        vespo_negative: The same where it is.
        aggregation: How the tokens are weighed; a key of ``AGGREGATIONS``.
        kl: The divergence from the reference.
        entropy: The entropy bonus.
        sampler_correction: Importance weights against the sampler; null for none.
        off_policy_threshold: A sequence of negative advantage leaves the surrogate when the mean
            of ``log(sampler / policy)`` over its tokens is above this; null keeps all.
        top_entropy_fraction: Only this share of the tokens, those of the highest entropy, has a
            surrogate and an entropy bonus (arXiv 2506.01939 section 5); costs a forward pass when
            one update follows a rollout.
        overlong_filtering: Leave completions that hit ``max_tokens`` out of the loss.

    Raises:
        ValueError: a value out of range, or choices that exclude each other.
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
        _require(
            self.clip_low >= 0 and (self.clip_low <= 1 or self.surrogate == "gmpo"),
            f"clip_low must lie in [0, 1], got {self.clip_low} (the ratio is held above "
            "1 - clip_low). Set model.objective.clip_low.",
        )
        _require(
            self.clip_high >= 0,
            f"clip_high must be >= 0, got {self.clip_high} (the ratio is held below "
            "1 + clip_high). Set model.objective.clip_high.",
        )
        _require(
            self.ratio_cap is None or self.surrogate == "clip",
            f"ratio_cap bounds surrogate: clip where it has no bound, not {self.surrogate}, which "
            "has its own. Set model.objective.surrogate to clip, or leave ratio_cap out.",
        )
        _require(
            self.ratio_cap is None or self.ratio_cap > 1 + self.clip_high,
            f"ratio_cap must be > 1 + clip_high, got {self.ratio_cap} and clip_high "
            f"{self.clip_high} (below it the clip would never act). Set model.objective.ratio_cap.",
        )
        _require(
            self.ratio == "token" or self.surrogate not in ("gmpo", "vespo"),
            f"surrogate: {self.surrogate} makes one ratio a sequence of its own out of the "
            "tokens' ratios, so ratio: sequence would do it twice. Set model.objective.ratio to "
            "token.",
        )
        _require(
            self.surrogate != "vespo"
            or self.sampler_correction is None
            or self.sampler_correction.level != "geometric",
            "surrogate: vespo weighs a sequence by the product of its tokens' ratios to the "
            "sampler, and sampler_correction.level: geometric gives their mean. Set "
            "model.objective.sampler_correction.level to token or sequence.",
        )
        _require(
            min(*self.sapo_temperatures, *self.vespo_positive, *self.vespo_negative) > 0,
            "sapo_temperatures, vespo_positive and vespo_negative must be > 0, got "
            f"{self.sapo_temperatures}, {self.vespo_positive} and {self.vespo_negative}. "
            "Set them in model.objective.",
        )
        _require(
            self.off_policy_threshold is None or self.off_policy_threshold > 0,
            f"off_policy_threshold must be > 0 or null, got {self.off_policy_threshold} (at 0 "
            "rounding alone would mask sequences). Set model.objective.off_policy_threshold.",
        )
        _require(
            0 < self.top_entropy_fraction <= 1,
            f"top_entropy_fraction must lie in (0, 1], got {self.top_entropy_fraction} (it is the "
            "share of tokens that is trained). Set model.objective.top_entropy_fraction.",
        )

    @property
    def ratio_bounds(self) -> tuple[float, float]:
        """Where the clip would cut."""
        if self.surrogate == "gmpo":
            return exp(-self.clip_low), exp(self.clip_high)
        return 1 - self.clip_low, 1 + self.clip_high

    @property
    def moves_every_row(self) -> bool:
        """Whether a row of advantage 0 can have a gradient."""
        has_bonus = self.entropy.coef != 0 or self.entropy.target is not None
        return has_bonus or self.kl.is_in_loss
