"""Diagnose a rollout step: why no group has a signal, as sentences.

Callbacks and commands decide what to do about them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lit_grpo.diagnostics.absent_scores import most_common_failure
from lit_grpo.diagnostics.causes.table import CAUSES
from lit_grpo.diagnostics.step_counts import StepCounts, count_step
from lit_grpo.types import Prompt, RolloutBatch
from lit_grpo.types.text import shorten

LIKELY_FRACTION = 0.5
"""A symptom that affects at least this share of a step is reported as a likely cause."""

SUDDEN_SHARE = 0.1
"""Share of completions with a reward above which a drop to none counts as sudden."""
_GO_BACK = (
    "Go back to an earlier checkpoint (lit-grpo checkpoints RUN), with a lower learning rate or a "
    "KL term."
)


def truncated_fraction(rollouts: RolloutBatch) -> float:
    return count_step(rollouts).truncated_fraction


def empty_fraction(rollouts: RolloutBatch) -> float:
    return count_step(rollouts).empty_fraction


def likely_causes(
    rollouts: RolloutBatch, counts: StepCounts | None = None, *, can_end: bool = True
) -> list[str]:
    """Return why a step has no reward and what to do, the likeliest cause first.

    Args:
        counts: Counts over all ranks; None counts the rollouts.
        can_end: Whether anything but the token limit ends a completion.
    """
    counts = counts or count_step(rollouts)
    if is_stale(counts):
        return [describe_stale(counts.stale_fraction)]
    causes = []
    if counts.differing and not counts.num_with_signal:
        causes.append(equal_rewards(counts))
    failure = most_common_failure(counts)
    if failure and failure.fraction >= LIKELY_FRACTION:
        causes.append(str(failure))
    if counts.empty_fraction >= LIKELY_FRACTION:
        causes.append(describe_empty(counts.empty_fraction))
    if can_end and counts.truncated_fraction >= LIKELY_FRACTION:
        causes.append(describe_truncated(counts.truncated_fraction))
    if counts.identical_fraction == 1:
        remedy = CAUSES["identical_completions"].remedy
        causes.append(f"In every group all completions are identical. {remedy}")
    return causes or [_never_matched(rollouts)]


def is_one_text(counts: StepCounts) -> bool:
    """Return whether all completions of each group are the same, and most are not empty."""
    is_same = counts.num_sampled > 0 and counts.identical_fraction == 1
    return is_same and counts.empty_fraction < LIKELY_FRACTION


def is_stale(counts: StepCounts) -> bool:
    """Return whether a step has no reward since most groups were dropped: weights were too old."""
    return not counts.num_valid and counts.stale_fraction >= LIKELY_FRACTION


def describe_stale(fraction: float) -> str:
    return (
        f"{fraction:.0%} of the groups were dropped: by the policy_versions of their completions, "
        "tokens were sampled with weights that are more than model.max_head_offpolicyness "
        f"optimizer steps old. {CAUSES['stale_rollouts'].remedy}"
    )


def describe_empty(fraction: float) -> str:
    return (
        f"{fraction:.0%} of the completions are empty: the policy ends them at once, as it may "
        "on prompts unlike those it has learned, or a server has lost its weights. "
        f"{CAUSES['empty'].remedy}"
    )


def describe_truncated(fraction: float) -> str:
    return (
        f"{fraction:.0%} of the completions were cut off at the token limit before they ended, so "
        f"their answers may be missing. {CAUSES['truncated'].remedy}"
    )


def _never_matched(rollouts: RolloutBatch) -> str:
    group = rollouts.groups[0]
    names = ", ".join(repr(name) for name in group.scores) or "none"
    given = group.prompt.given_answer
    answer = group.prompt.answer if given is None else given
    gold = "" if answer is None else f", whose answer is {answer!r},"
    return (
        f"The rewards ({names}) ran without errors and gave 0: no completion has the format or "
        f"answer that they look for. Prompt {group.prompt.id!r}{gold} was completed with "
        f"{shorten(group.completions[0].text)!r}.{_notes_for_functions(group.prompt)} "
        "Read some rows of completions/; then run lit-grpo sft first, or make the reward and the "
        "prompt ask for the same format."
    )


def _notes_for_functions(prompt: Prompt) -> str:
    """Return what a reward that is a function gets and may take for a text."""
    notes = ""
    if isinstance(prompt.given_answer, int | float):
        kind = type(prompt.given_answer).__name__
        notes += f" A reward function gets this answer as {kind}, which never equals a text."
    if prompt.messages is not None:
        notes += (
            " A reward that is a function gets each completion as a conversation, whose text is "
            'completion[0]["content"].'
        )
    return notes


def how_it_began(shares: Sequence[float], *, is_one_text: bool = False) -> str:
    """Return whether rewards stopped within a step or faded away, from the steps before.

    Args:
        shares: Share of completions with a reward in the last steps with any, the oldest first.
        is_one_text: Whether the policy now samples the same text for all rows of a group.
    """
    if not shares:
        return "No step before it had a reward."
    last, best = shares[-1], max(shares)
    if is_one_text:
        return (
            f"In the step before, {last:.0%} of the completions had a reward; now all completions "
            f"of a group are the same text: the policy has collapsed. {_GO_BACK}"
        )
    if last >= SUDDEN_SHARE and last >= best / 2:
        return (
            f"In the step before, {last:.0%} of the completions had a reward: a fall to nothing "
            "within one step points to an outage of a reward or an engine, not to the policy."
        )
    if best >= SUDDEN_SHARE:
        num_steps = len(shares) - shares.index(best)
        return (
            f"The share of completions with a reward fell from {best:.0%} to {last:.0%} over "
            f"{num_steps} steps before: the policy has collapsed. {_GO_BACK}"
        )
    return f"In the step before, {last:.1%} of the completions had a reward: hardly any."


def sample_completions(rollouts: RolloutBatch, number: int) -> list[str]:
    """Return a line for the first completion of some prompts: the prompt's id, text, scores."""
    step = max(1, len(rollouts.groups) // number)
    lines = []
    for group in rollouts.groups[::step][:number]:
        scores = ", ".join(
            f"{name} {score.outcome if score.value is None else f'{score.value:g}'}"
            for name, (score, *_) in group.scores.items()
        )
        text = shorten(group.completions[0].text)
        lines.append(f"prompt {group.prompt.id!r}: {text!r} ({scores})")
    return lines


def no_signal(rollouts: RolloutBatch, *, can_end: bool = True) -> list[str]:
    """Return sentences on why no group has a signal; empty if at least one has.

    Args:
        can_end: Whether anything but the token limit ends a completion.
    """
    counts = count_step(rollouts)
    if counts.num_with_signal:
        return []
    if reason := nothing_to_compare(counts):
        return [f"There is no signal: {reason}"]
    if not counts.num_rewarded:
        causes = likely_causes(rollouts, counts, can_end=can_end)
        return ["There is no signal: every reward is exactly 0.", *causes]
    return [equal_rewards(counts)]


def nothing_to_compare(counts: StepCounts) -> str | None:
    """Return why no group has rows to compare, or None if at least one has."""
    if is_stale(counts):
        return f"no row is valid: {describe_stale(counts.stale_fraction)}"
    if counts.num_counted:
        return None
    failure = most_common_failure(counts)
    if not counts.num_valid:
        return f"no row is valid: {failure}" if failure else "no row is valid."
    commonest = f" The most common failure: {failure}" if failure else ""
    return f"no group has two valid rows to compare.{commonest}"


def equal_rewards(counts: StepCounts) -> str:
    """Explain that the rewards inside every group are equal, and what may help."""
    if counts.differing:
        cancelling = " and ".join(map(repr, counts.differing))
        return (
            f"All advantages are 0 although {cancelling} differ inside groups: they "
            f"cancel out in the weighted sum. {CAUSES['cancelling_rewards'].remedy}"
        )
    mean = counts.reward_sum / counts.num_valid if counts.num_valid else math.nan
    failure = most_common_failure(counts)
    if failure and 2 * counts.num_valid < counts.num_rows:
        return (
            f"All advantages are 0: only {counts.num_valid} of {counts.num_rows} rows have a "
            f"reward, and inside each group those are equal. {failure}"
        )
    return (
        f"All advantages are 0: inside each group all rewards are equal (their mean is {mean:.3g})"
        f", so this step learns nothing from them. {CAUSES['equal_rewards'].remedy}"
    )
