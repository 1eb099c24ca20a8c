"""Diagnose a rollout step: scores that are absent, groups without signal.

Findings are numbers and sentences; callbacks and commands decide what to do about them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from lit_grpo.diagnostics.causes.table import CAUSES
from lit_grpo.diagnostics.step_counts import (
    Scores,
    StepCounts,
    count_asked,
    count_scores,
    count_step,
    without_value,
)
from lit_grpo.types import Outcome, Prompt, RolloutBatch, Score

SHOWN_CHARACTERS = 120

LIKELY_FRACTION = 0.5
"""A symptom that affects at least this share of a step is reported as a likely cause."""

ADVICE = {
    Outcome.ERROR: "Fix the exception, or check its service and credentials",
    Outcome.TIMEOUT: "Check its service, or give it more time",
    Outcome.RATE_LIMITED: "Lower its concurrency or raise its quota",
    Outcome.UNAVAILABLE: "Check that its service runs and can be reached",
    Outcome.CONTENT_FILTERED: "Check what the filter objects to, or have it relaxed",
    Outcome.OUT_OF_TOKENS: "Raise max_completion_tokens of its judge",
    Outcome.BUDGET_SPENT: "Raise limits.max_cost_usd of its judge",
    Outcome.PARSE_ERROR: "Compare its prompt with its replies",
    Outcome.ABSTAIN: "It returned None: check whether a return is missing, unless that is intended",
    Outcome.NOT_SAMPLED: "Check the rollout engine's log",
    Outcome.TRUNCATED: "Raise its max_tokens, or lower model.sampling.max_tokens",
}

BUG_ADVICE = "Fix the code of the reward; if it asks a service, look at what that replied"

SUDDEN_SHARE = 0.1
"""Share of completions with a reward above which a drop to none counts as sudden."""
_GO_BACK = (
    "Go back to an earlier checkpoint (lit-grpo checkpoints RUN), with a lower learning rate or a "
    "KL term."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The most common reason why a reward gave no value."""

    reward: str
    outcome: Outcome
    fraction: float
    """Share of this reward's scores that ended this way, other sources left out."""
    detail: str
    """Detail of one of them."""
    is_bug: bool = False
    """Whether they look like a mistake in the code of the reward."""

    @property
    def advice(self) -> str:
        return advice_on(self.outcome, is_bug=self.is_bug)

    def __str__(self) -> str:
        example = f", for instance: {shorten_middle(self.detail)}" if self.detail else ""
        return (
            f"{self.fraction:.0%} of the scores of reward {self.reward!r} ended as "
            f"{self.outcome}{example}. {self.advice}."
        )


def never_scored(rollouts: RolloutBatch) -> dict[str, str]:
    """Return a sentence by reward that returned None for every completion it was asked for.

    Empty if no row is valid, for which there is another finding.
    """
    found = {}
    for name in rollouts.groups[0].scores if rollouts.valid.any() else ():
        scores = [one for group in rollouts.groups for one in group.scores[name]]
        asked = [s for s in scores if s.is_for_source and s.outcome is not Outcome.NOT_SAMPLED]
        if asked and {one.outcome for one in asked} == {Outcome.ABSTAIN}:
            why = next((one.detail for one in asked if one.detail), ADVICE[Outcome.ABSTAIN])
            found[name] = (
                f"Reward {name!r} gave none of {len(asked)} completions a value, so it does not "
                f"count. {why[0].upper()}{why[1:].rstrip('.')}."
            )
    return found


def advice_on(outcome: Outcome, *, is_bug: bool) -> str:
    """Return what to do about scores that ended this way."""
    return BUG_ADVICE if is_bug else ADVICE[outcome]


def find_failure(
    rollouts: RolloutBatch,
    rewards: Collection[str] | None = None,
    counts_as_failure: Callable[[Score], bool] = lambda score: True,
) -> Failure | None:
    """Return the reward and outcome that most rows without a value share.

    None if every score has a value, or belongs to a reward that does not apply.

    Args:
        rewards: Names of the rewards to look at; all of them if None.
        counts_as_failure: Whether a score `without_value` counts; by default every one does.
    """
    counts, details = count_scores(
        (name, score)
        for name, score in without_value(rollouts, rewards)
        if counts_as_failure(score)
    )
    return _most_common(counts, details, count_asked(rollouts))


def most_common_failure(counts: StepCounts, outcome: Outcome | None = None) -> Failure | None:
    """Return the reward and outcome that most rows without a value share, like `find_failure`.

    Args:
        outcome: The only one to look at; None looks at all.
    """
    failures = counts.failures
    if outcome is not None:
        failures = Counter({one: number for one, number in failures.items() if one[1] == outcome})
    return _most_common(failures, counts.details, counts.asked)


def _most_common(
    counts: Counter[Scores], details: Mapping[Scores, str], asked: Mapping[str, int]
) -> Failure | None:
    if not counts:
        return None
    kind, count = counts.most_common(1)[0]
    name, outcome, is_bug = kind
    return Failure(
        reward=name,
        outcome=outcome,
        fraction=count / asked[name],
        detail=details[kind],
        is_bug=is_bug,
    )


def shorten(text: str) -> str:
    """Return the end of a long text, where the cause of an error or the final answer is."""
    text = text.strip()
    return text if len(text) <= SHOWN_CHARACTERS else "…" + text[-SHOWN_CHARACTERS:]


def shorten_middle(text: str) -> str:
    """Return the start and the end of a long text: what failed, and why."""
    text = text.strip()
    start = SHOWN_CHARACTERS // 3
    end = SHOWN_CHARACTERS - start
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:start]} … {text[-end:]}"


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
        f"{shorten(group.completions[0].text)!r}.{_as_functions_see(group.prompt)} "
        "Read some rows of completions/; then run lit-grpo sft first, or make the reward and the "
        "prompt ask for the same format."
    )


def _as_functions_see(prompt: Prompt) -> str:
    """Return what a plain reward function gets in place of a text, which it may not expect."""
    notes = ""
    if isinstance(prompt.given_answer, int | float):
        kind = type(prompt.given_answer).__name__
        notes += f" A reward function gets this answer as {kind}, which never equals a text."
    if prompt.messages is not None:
        notes += (
            " A reward function gets each completion as a conversation, whose text is "
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
    what = "no group has two valid rows to compare" if counts.num_valid else "no row is valid"
    failure = most_common_failure(counts)
    return f"{what}: {failure}" if failure else f"{what}."


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
