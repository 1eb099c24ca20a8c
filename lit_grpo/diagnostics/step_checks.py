"""Check a rollout step for the causes of trouble, against the steps before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lit_grpo.diagnostics.absent_scores import most_common_failure
from lit_grpo.diagnostics.causes.table import CAUSES
from lit_grpo.diagnostics.observed_step import ObservedStep, usual_value
from lit_grpo.diagnostics.step_counts import StepCounts
from lit_grpo.diagnostics.step_findings import (
    LIKELY_FRACTION,
    describe_empty,
    describe_truncated,
    equal_rewards,
    nothing_to_compare,
)
from lit_grpo.diagnostics.waits import why_judges_are_slow
from lit_grpo.types import Outcome

CERTAIN = 0.01
"""A sequence with a log-probability this close to 0 would be sampled 99 times out of 100."""
SLOW_FACTOR, SLOW_SHARE, SLOW_SECONDS = 3.0, 0.2, 1.0
LITTLE_MEMORY = 0.05


Check = Callable[[ObservedStep], str | None]
"""Returns what is wrong and what to do, or None."""


def nothing_trained(step: ObservedStep) -> str | None:
    if step.counts.num_trained:
        return None
    why = nothing_to_compare(step.counts) or _why_filtered(step.counts.truncated_fraction)
    return f"No token contributes to the loss, so the policy did not change: {why}"


def _why_filtered(truncated_fraction: float) -> str:
    """Return why no row with a reward is trained on."""
    if truncated_fraction == 0:
        return "every completion with a reward is empty."
    return (
        "every valid row is filtered. See model.objective.overlong_filtering and "
        f"model.sampling.max_tokens: {truncated_fraction:.0%} of the completions were cut off."
    )


def cancelling_rewards(step: ObservedStep) -> str | None:
    is_cancelled = _all_equal(step.counts) and step.counts.differing
    return equal_rewards(step.counts) if is_cancelled else None


def solved(step: ObservedStep) -> str | None:
    if not _is_solved(step):
        return None
    return (
        f"All groups are solved: every reward is {step.counts.only_reward:.3g}, the best so far, "
        f"so there is nothing left to learn from these prompts. {CAUSES['solved'].remedy}"
    )


def unsolved(step: ObservedStep) -> str | None:
    if not _is_unsolved(step):
        return None
    return (
        f"All groups fail: every reward is {step.counts.only_reward:.3g}, the worst so far, so "
        f"this step learns nothing from them. {CAUSES['unsolved'].remedy}"
    )


def equal(step: ObservedStep) -> str | None:
    is_extreme = _is_solved(step) or _is_unsolved(step)
    if not _all_equal(step.counts) or step.counts.differing or is_extreme:
        return None
    return equal_rewards(step.counts)


def _is_solved(step: ObservedStep) -> bool:
    """Return whether the step's only reward is the best of a run in which rewards differed."""
    reward = _only_reward(step)
    if reward is None or step.reward_range is None:
        return False
    lowest, highest = step.reward_range
    return reward >= highest and reward > lowest


def _is_unsolved(step: ObservedStep) -> bool:
    """Return whether the step's only reward is the worst of a run in which rewards differed."""
    reward = _only_reward(step)
    if reward is None or step.reward_range is None:
        return False
    lowest, highest = step.reward_range
    return reward <= lowest and reward < highest


def _only_reward(step: ObservedStep) -> float | None:
    counts = step.counts
    return counts.only_reward if _all_equal(counts) and not counts.differing else None


def no_advantage(step: ObservedStep) -> str | None:
    counts = step.counts
    if not _is_without_advantage(counts) or _all_equal(counts):
        return None
    remedies = CAUSES["no_advantage"].remedies
    num_filtered = counts.num_counted - counts.num_trained
    if not num_filtered:
        return f"All advantages are 0 although rewards differ inside groups. {remedies[1]}"
    return (
        f"All advantages are 0 on the {counts.num_trained} rows that are left to train on; "
        f"{num_filtered} others are filtered, {counts.truncated_fraction:.0%} of the "
        f"completions were cut off. {remedies[0]}"
    )


def _all_equal(counts: StepCounts) -> bool:
    """Return whether the step trains on advantages that are 0 because all rewards are equal."""
    return _is_without_advantage(counts) and not counts.num_with_signal


def _is_without_advantage(counts: StepCounts) -> bool:
    return bool(counts.num_trained) and not counts.has_advantage


def certain_policy(step: ObservedStep) -> str | None:
    counts = step.counts
    if not counts.num_with_tokens or counts.largest_logprob >= CERTAIN:
        return None
    remedies = CAUSES["certain_policy"].remedies
    if not counts.largest_logprob:
        return f"All sequence log-probabilities of the sampler are exactly 0. {remedies[1]}"
    return (
        f"All sequence log-probabilities are near 0 (the lowest is {counts.lowest_logprob:.2g}): "
        f"the policy is certain of all its completions, so there is nothing to compare. "
        f"{remedies[0]}"
    )


def identical_completions(step: ObservedStep) -> str | None:
    if (fraction := step.counts.identical_fraction) < LIKELY_FRACTION:
        return None
    return (
        f"In {fraction:.0%} of the groups all {step.counts.group_size} completions are "
        f"identical, so they cannot be compared. {CAUSES['identical_completions'].remedy}"
    )


def truncated(step: ObservedStep) -> str | None:
    fraction = step.counts.truncated_fraction
    return describe_truncated(fraction) if step.can_end and fraction > LIKELY_FRACTION else None


def empty(step: ObservedStep) -> str | None:
    fraction = step.counts.empty_fraction
    return describe_empty(fraction) if fraction >= LIKELY_FRACTION else None


def unparseable(step: ObservedStep) -> str | None:
    failure = most_common_failure(step.counts, Outcome.PARSE_ERROR)
    return str(failure) if failure and failure.fraction >= LIKELY_FRACTION else None


def has_fallen(past: Sequence[Mapping[str, float]], metrics: Mapping[str, float]) -> bool:
    """Return whether the reward is so far below the usual that the texts are worth a look."""
    reward, usual = metrics.get("reward/mean"), usual_value(past, "reward/mean")
    return reward is not None and usual is not None and usual > 0 and reward < 0.8 * usual


def collapse(step: ObservedStep) -> str | None:
    """Look for shorter, more certain or repetitive completions with a lower reward."""
    if not has_fallen(step.past, step.metrics):
        return None
    reward, usual = step.metrics["reward/mean"], step.usual("reward/mean")
    signs = []
    if (length := step.factor("completions/mean_length")) is not None and length < 1 / 3:
        signs.append(f"completions have {length:.0%} of their usual length")
    if (entropy := step.factor("policy/entropy")) is not None and entropy < 0.1:
        signs.append(f"the entropy is {entropy:.1%} of the usual")
    if (repeating := step.counts.repetitive_fraction) >= LIKELY_FRACTION:
        signs.append(f"{repeating:.0%} of the completions repeat themselves")
    if not signs:
        return None
    return (
        f"The policy collapses: the reward is {reward:.3g} and was {usual:.3g}, and "
        f"{' and '.join(signs)}. {CAUSES['collapse'].remedy}"
    )


def kl_explosion(step: ObservedStep) -> str | None:
    kl, factor = step.metrics.get("policy/kl", 0.0), step.factor("policy/kl")
    if factor is None or kl <= 0.5 or factor <= 10:
        return None
    return (
        f"The KL divergence from the reference is {kl:.3g}, {factor:.0f} times its usual value. "
        f"{CAUSES['kl_explosion'].remedy}"
    )


def sampler_mismatch(step: ObservedStep) -> str | None:
    name = "sampler/logprob_difference_mean"
    difference, factor = step.metrics.get(name, 0.0), step.factor(name)
    if difference <= 0.2 or (factor is not None and factor <= 5):
        return None
    return (
        f"Logprobs of the sampler and of the policy differ by {difference:.3g} per token on "
        f"average ({name}). {CAUSES['sampler_mismatch'].remedy}"
    )


def not_finite_gradient(step: ObservedStep) -> str | None:
    if not step.num_skipped:
        return None
    return (
        f"{step.num_skipped} optimizer steps in a row were skipped because their gradients are not "
        f"finite. {CAUSES['not_finite_gradient'].remedy}"
    )


def not_finite_weights(step: ObservedStep) -> str | None:
    if step.weights_are_finite:
        return None
    remedy = CAUSES["not_finite_weights"].remedy
    return f"Weights of the policy are NaN or infinite after this step. {remedy}"


def slow_stage(step: ObservedStep) -> str | None:
    seconds = {k: v for k, v in step.metrics.items() if k.startswith("seconds/")}
    total = sum(seconds.values())
    for name, value in sorted(seconds.items(), key=lambda one: -one[1]):
        factor = step.factor(name)
        is_relevant = value >= max(SLOW_SHARE * total, SLOW_SECONDS)
        if is_relevant and factor is not None and factor > SLOW_FACTOR:
            stage = name.removeprefix("seconds/")
            return (
                f"The stage {stage} took {value:.1f} s, {factor:.1f} times as long as usual"
                f"{_why_slow(step, stage, value)}. {CAUSES['slow_stage'].remedy}"
            )
    return None


def _why_slow(step: ObservedStep, stage: str, seconds: float) -> str:
    """Return the reason, as the end of a sentence; empty if it is not known."""
    if step.has_grown("memory/num_alloc_retries"):
        return ": the GPU runs out of memory repeatedly, and frees its cache"
    left = step.metrics.get("memory/available_fraction", 1.0)
    if left < LITTLE_MEMORY:
        return f": only {left:.0%} of the machine's memory is left"
    length = step.factor("completions/mean_length")
    if stage in ("generation", "update", "logprob") and length is not None and length > 1.5:
        return f": completions are {length:.1f} times as long"
    if stage in ("update", "logprob") and step.has_grown("perf/num_compilations"):
        return ": the model was compiled again for new shapes"
    if step.metrics.get("rollout/restarts"):
        return ": a server was restarted"
    return why_judges_are_slow(step.metrics, seconds) if stage == "reward" else ""


CHECKS: Mapping[str, Check] = {
    "not_finite_weights": not_finite_weights,
    "not_finite_gradient": not_finite_gradient,
    "nothing_trained": nothing_trained,
    "solved": solved,
    "unsolved": unsolved,
    "cancelling_rewards": cancelling_rewards,
    "equal_rewards": equal,
    "no_advantage": no_advantage,
    "certain_policy": certain_policy,
    "identical_completions": identical_completions,
    "truncated": truncated,
    "empty": empty,
    "unparseable": unparseable,
    "collapse": collapse,
    "kl_explosion": kl_explosion,
    "sampler_mismatch": sampler_mismatch,
    "slow_stage": slow_stage,
}
"""Cause -> its check, the gravest first."""

BEFORE_UPDATE = ("certain_policy", "identical_completions", "truncated", "empty", "unparseable")
"""Causes that the rollouts show, before they are trained on."""

NOT_FINITE = ("not_finite_weights", "not_finite_gradient")
"""Causes that do not speak against weights which are finite."""

COMPARED = {
    "collapse": "reward/mean",
    "kl_explosion": "policy/kl",
    "sampler_mismatch": "sampler/logprob_difference_mean",
}
"""Cause in the weights that a comparison with the past shows -> its metric."""
