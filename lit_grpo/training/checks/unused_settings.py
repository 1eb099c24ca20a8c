"""Find settings that, with the others, have no effect, or not the intended one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from lit_grpo.objective import AdvantageConfig, Objective
from lit_grpo.training.batching import UpdateConfig

_NO_LOWER_BOUND = ("cispo", "sapo", "vespo", "none")
_NO_UPPER_BOUND = ("sapo", "vespo", "none")
_ONLY_IN_SURROGATE = ("ratio", "sampler_correction", "sampler_masks", "off_policy_threshold")

_K1_IN_LOSS = (
    "model.objective.kl.estimator k1 with kl.place: loss does not hold the policy near the "
    "reference: its expected gradient is 0 for tokens of the policy itself, and after further "
    "updates it only lowers their probability. Set model.objective.kl.gradient to k2, which is "
    "the gradient of the KL divergence, or kl.place to reward."
)

_READ_BY_A_FUNCTION = (
    "function", "ratio", "clip_low", "clip_high", "old_logprobs", "kl", "overlong_filtering"
)  # fmt: skip
"""Settings that decide what a function used as the loss gets, or that it can read."""


def settings_without_effect(
    objective: Objective, advantage: AdvantageConfig, update: UpdateConfig
) -> list[str]:
    """Return a message for each changed setting that has no effect, or not the intended one."""
    found = [*_of_objective(objective, update), *_of_advantage(advantage)]
    messages = [f"model.{key} has no effect with {other}." for key, other in found]
    kl, has_loss = objective.kl, objective.function is None
    is_plain = kl.is_in_loss and kl.gradient == "estimator" and not kl.importance
    return [*messages, _K1_IN_LOSS] if has_loss and is_plain and kl.estimator == "k1" else messages


def _of_objective(objective: Objective, update: UpdateConfig) -> Iterator[tuple[str, str]]:
    surrogate = objective.surrogate
    others = f"surrogate: {surrogate}"
    if isinstance(surrogate, str):
        unused = {
            "clip_low": surrogate in _NO_LOWER_BOUND,
            "clip_high": surrogate in _NO_UPPER_BOUND,
            "sapo_temperatures": surrogate != "sapo",
            "vespo_positive": surrogate != "vespo",
            "vespo_negative": surrogate != "vespo",
            "dppo_divergence": surrogate != "dppo",
            **dict.fromkeys(_ONLY_IN_SURROGATE, surrogate == "none"),
        }
        changed = [key for key in _changed(objective) if unused.get(key)]
        yield from ((f"objective.{key}", others) for key in changed)
    if objective.function is not None:
        changed = [key for key in _changed(objective) if key not in _READ_BY_A_FUNCTION]
        yield from ((f"objective.{key}", "a function instead of the loss") for key in changed)
    if objective.old_logprobs == "sampler" and "sampler_correction" in _changed(objective):
        yield "objective.sampler_correction", "old_logprobs: sampler (the weights are 1)"
    yield from _of_terms(objective, update)


def _of_terms(objective: Objective, update: UpdateConfig) -> Iterator[tuple[str, str]]:
    kl, entropy, covariance = objective.kl, objective.entropy, objective.covariance
    if kl.coef == 0:
        yield from ((f"objective.kl.{key}", "kl.coef: 0") for key in _changed(kl))
    elif kl.target is None and "horizon" in _changed(kl):
        yield "objective.kl.horizon", "kl.target: null"
    if objective.distillation.coef == 0 and objective.distillation.top_k is not None:
        yield "objective.distillation.top_k", "distillation.coef: 0"
    if entropy.target is None:
        changed = [key for key in _changed(entropy) if key != "coef"]
        yield from ((f"objective.entropy.{key}", "entropy.target: null") for key in changed)
    if objective.sft.coef == 0 and "min_reward" in _changed(objective.sft):
        yield "objective.sft.min_reward", "sft.coef: 0"
    if covariance is not None:
        unused = {"clip": ("coef",), "kl": ("low", "high")}[covariance.action]
        changed = [key for key in _changed(covariance) if key in unused]
        action = f"covariance.action: {covariance.action}"
        yield from ((f"objective.covariance.{key}", action) for key in changed)
        is_first_update = update.optimizer_steps == 1 and objective.old_logprobs == "policy"
        if covariance.action == "kl" and is_first_update:
            yield "objective.covariance.action kl", "one update per rollout step (the ratio is 1)"


def _of_advantage(advantage: AdvantageConfig) -> Iterator[tuple[str, str]]:
    changed = _changed(advantage)
    if advantage.function is not None:
        others = [key for key in changed if key != "function"]
        yield from ((f"advantage.{key}", "a function instead of all of them") for key in others)
    elif "batch_statistics" in changed and not (
        advantage.rescale or "batch" in (advantage.baseline, advantage.deviation)
    ):
        yield "advantage.batch_statistics", "no baseline, deviation or rescaling over the batch"


def _changed(config: Any) -> list[str]:
    """Return the fields of a dataclass that differ from their defaults."""
    return [
        field.name
        for field in fields(config)
        if getattr(config, field.name) not in (field.default, [])
    ]
