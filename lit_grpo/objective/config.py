"""The settings of the objective: independent choices that compose.

Each choice names a function in a table of this package, or is your own function (in a config: its
import path).
Combinations that cannot work are refused when the config is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp, inf
from typing import Literal

from lit_grpo.objective.custom import Function, check_arguments, describe
from lit_grpo.objective.terms import (
    CovarianceTerm,
    DistillationTerm,
    EntropyTerm,
    KLTerm,
    SamplerCorrection,
    SamplerMask,
    SFTTerm,
)
from lit_grpo.types import UserError, check_range
from lit_grpo.types.field_types import check_fields
from lit_grpo.types.keywords import checks_keywords

_KEY = "model.objective."


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class Objective:
    """The objective that an optimizer step minimises.

    Args:
        surrogate: How ratio and advantage become a loss: PPO's ``clip``, ``cispo`` (MiniMax-M1),
            ``sapo``, ``gmpo``, ``vespo`` or ``dppo``. ``none`` leaves the loss to the other terms,
            and rewards are only monitored. Or your own function (in a config: its import path),
            which gets `LossInputs` and this objective and returns [N, C] or [N, 1] losses.
        ratio: Ratio of the current over the old policy: one per ``token``, or one per
            ``sequence``, the geometric mean of its tokens' ratios (GSPO; TRL:
            importance_sampling_level).
        clip_low: The lower bound of the ratio is ``1 - clip_low`` (TRL: epsilon); for ``gmpo`` the
            lower bound of its logarithm is ``-clip_low``, for ``dppo`` the largest divergence of a
            token that becomes less likely.
        clip_high: The upper bound of the ratio is ``1 + clip_high`` (0.28 in DAPO,
            "clip-higher"; TRL: epsilon_high); for ``gmpo`` the upper bound of its logarithm
            is ``clip_high``, for ``dppo`` the largest divergence of a token that becomes more
            likely.
        ratio_cap: Upper bound of the ratio where the advantage is negative, which ``clip`` alone
            leaves unbounded: delta of the two-sided clip (TRL: delta), c of dual clip (verl:
            clip_ratio_c). Null for none.
        sapo_temperatures: Temperatures of the ``sapo`` gate where the advantage is positive, and
            elsewhere.
        vespo_positive: k and lambda of the ``vespo`` weight where the advantage is not negative.
        vespo_negative: k and lambda of the ``vespo`` weight where the advantage is negative.
        dppo_divergence: The divergence that ``dppo`` bounds, of a distribution over this token and
            all others: total variation ``tv``, the change of the probability; or ``kl``.
        old_logprobs: Whose logprobs stand for the old policy in the ratio: the ``policy``'s
            before the first update, or the ``sampler``'s, which takes no forward pass and leaves
            no difference to correct (verl: bypass_mode).
        aggregation: Weights of the tokens: equal over the minibatch (``token``, DAPO) or per rank
            (``local_token``); equal per ``sequence`` (GRPO); ``1 / sequences``
            (``sequence_sum``, LUSPO); ``1 / (sequences * max_tokens)`` (``constant``, Dr. GRPO).
        kl: KL divergence from the reference.
        distillation: KL divergence from a teacher.
        entropy: Entropy bonus.
        sampler_correction: Importance weights against the sampler; null for none.
        sampler_masks: What to mask where policy and sampler differ; a token keeps its surrogate if
            every mask keeps it.
        covariance: What to do with tokens of high covariance; null for nothing.
        sft: Likelihood of good completions.
        off_policy_threshold: Drop sequences with a negative advantage from the surrogate if the
            mean of ``log(sampler / policy)`` over their tokens is above this (TRL:
            off_policy_mask_threshold); null keeps all.
        top_entropy_fraction: Apply the surrogate and the entropy bonus only to this share of the
            tokens, those with the highest entropy (arXiv 2506.01939 section 5; TRL:
            top_entropy_quantile). Below 1 this costs a forward pass if there is one optimizer step
            per rollout step.
        overlong_filtering: Exclude completions that hit ``max_tokens`` from the loss (TRL:
            mask_truncated_completions).
        function: Your own function (in a config: its import path) for the whole loss. It gets
            `LossInputs` and returns a scalar, the share of a micro-batch in the loss of the
            optimizer step.

    Raises:
        UserError: a value is out of range, or choices cannot be combined.
    """

    surrogate: Literal["clip", "cispo", "sapo", "gmpo", "vespo", "dppo", "none"] | Function = "clip"
    ratio: Literal["token", "sequence"] = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    ratio_cap: float | None = None
    sapo_temperatures: tuple[float, float] = (1.0, 1.05)
    vespo_positive: tuple[float, float] = (2.0, 3.0)
    vespo_negative: tuple[float, float] = (3.0, 2.0)
    dppo_divergence: Literal["tv", "kl"] = "tv"
    old_logprobs: Literal["policy", "sampler"] = "policy"
    aggregation: Literal["token", "local_token", "sequence", "sequence_sum", "constant"] = "token"
    kl: KLTerm = KLTerm()
    distillation: DistillationTerm = DistillationTerm()
    entropy: EntropyTerm = EntropyTerm()
    sampler_correction: SamplerCorrection | None = SamplerCorrection()
    sampler_masks: list[SamplerMask] = field(default_factory=list)
    covariance: CovarianceTerm | None = None
    sft: SFTTerm = SFTTerm()
    off_policy_threshold: float | None = None
    top_entropy_fraction: float = 1.0
    overlong_filtering: bool = False
    function: Function | None = None

    def __post_init__(self) -> None:
        check_fields(_KEY.rstrip("."), self)
        self._check_ranges()
        for name in ("surrogate", "function"):
            check_arguments(f"{_KEY}{name}", getattr(self, name), "inputs", "objective")
        if self.ratio_cap is not None and self.surrogate != "clip":
            name = describe(self.surrogate) if callable(self.surrogate) else self.surrogate
            raise UserError(
                f"ratio_cap needs surrogate: clip, got {name} (which bounds its "
                f"ratio in its own way). Set {_KEY}surrogate to clip, or leave ratio_cap out."
            )
        if self.ratio == "sequence" and self.surrogate in ("gmpo", "vespo", "dppo"):
            raise UserError(
                f"surrogate: {self.surrogate} needs ratio: token, got sequence (it uses the ratios "
                f"of a sequence's tokens in its own way). Set {_KEY}ratio to token."
            )
        is_geometric = self.sampler_correction and self.sampler_correction.level == "geometric"
        if self.surrogate == "vespo" and is_geometric:
            raise UserError(
                "surrogate: vespo cannot be combined with sampler_correction.level: geometric "
                "(it needs the product of the tokens' ratios, not their mean). "
                f"Set {_KEY}sampler_correction.level to token or sequence."
            )

        if self.surrogate == "none" and self.function is None and not self._has_other_term:
            raise UserError(
                "surrogate: none leaves nothing to minimise (no other term has a gradient). Set "
                f"{_KEY}distillation.coef, or another {_KEY}surrogate."
            )

    def _check_ranges(self) -> None:
        check_range(
            f"{_KEY}clip_low",
            self.clip_low,
            at_least=0,
            at_most=1 if self.surrogate in ("clip", "cispo") else None,
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
        """The ratios at which the surrogate cuts off the gradient or bounds its weight."""
        bounds = {
            "clip": (1 - self.clip_low, 1 + self.clip_high),
            "cispo": (0.0, 1 + self.clip_high),
            "gmpo": (exp(-self.clip_low), exp(self.clip_high)),
        }
        return bounds.get(str(self.surrogate), (0.0, inf))

    @property
    def has_entropy_bonus(self) -> bool:
        return self.entropy.coef != 0 or self.entropy.target is not None

    @property
    def has_gradient_at_zero_advantage(self) -> bool:
        """Whether a row with advantage 0 can have a gradient."""
        is_own = callable(self.surrogate) or self.function is not None
        is_pulled = self.covariance is not None and self.covariance.action == "kl"
        is_in_loss = self.kl.is_in_loss or self.distillation.coef > 0
        return self.has_entropy_bonus or is_in_loss or is_own or is_pulled

    @property
    def own_functions(self) -> dict[str, Function]:
        """The user's functions by their keys, such as ``objective.surrogate``."""
        level = self.sampler_correction and self.sampler_correction.level
        given = {
            "objective.surrogate": self.surrogate,
            "objective.function": self.function,
            "objective.sampler_correction.level": level,
        }
        return {key: one for key, one in given.items() if callable(one)}

    @property
    def advice_if_not_finite(self) -> str:
        """Advice on what to check first if a gradient is not finite: the user's functions."""
        own = " and ".join(map(describe, self.own_functions.values()))
        return (
            f"First check what {own} returned: only its first values are checked. " if own else ""
        )

    @property
    def _has_other_term(self) -> bool:
        """Whether a term other than the surrogate has a gradient."""
        return self.has_gradient_at_zero_advantage or self.sft.coef > 0
