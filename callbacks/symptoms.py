"""What one rollout step shows of its health, in numbers and in words. Judges; warns nobody."""

from __future__ import annotations

from lit_grpo.failures import find_failure, shorten
from lit_grpo.types import RolloutBatch

MOST = 0.5
"""From this share of a step on, a symptom is called the likely cause."""


def truncated_fraction(rollouts: RolloutBatch) -> float:
    completions = rollouts.completions
    return sum(completion.is_truncated for completion in completions) / len(completions)


def empty_fraction(rollouts: RolloutBatch) -> float:
    completions = rollouts.completions
    return sum(not completion.text.strip() for completion in completions) / len(completions)


def identical_fraction(rollouts: RolloutBatch) -> float:
    """Of the groups, those whose completions are all the same."""
    same = [len({c.token_ids for c in group.completions}) == 1 for group in rollouts.groups]
    return sum(same) / len(same)


def likely_causes(rollouts: RolloutBatch) -> list[str]:
    """Why a step has no reward, the likeliest cause first, each with what to do."""
    causes = []
    failure = find_failure(rollouts)
    if failure and failure.fraction >= MOST:
        causes.append(str(failure))
    if (fraction := empty_fraction(rollouts)) >= MOST:
        causes.append(
            f"{fraction:.0%} of the completions are empty. Look at the rollout engine's log: it "
            "may have lost its weights or its server."
        )
    if (fraction := truncated_fraction(rollouts)) >= MOST:
        causes.append(
            f"{fraction:.0%} of the completions were cut off before they ended, so their answers "
            "are missing. Raise model.sampling.max_tokens or ask for shorter answers."
        )
    if identical_fraction(rollouts) == 1:
        causes.append(
            "In every group all completions are identical. Raise model.sampling.temperature; if "
            "it is high already the policy has collapsed: start again from an earlier checkpoint "
            "with a lower learning rate."
        )
    return causes or [_never_matched(rollouts)]


def _never_matched(rollouts: RolloutBatch) -> str:
    group = rollouts.groups[0]
    names = ", ".join(repr(name) for name in group.scores) or "none"
    gold = "" if group.prompt.answer is None else f", whose answer is {group.prompt.answer!r},"
    return (
        f"The rewards ({names}) answer and give 0: no completion has the format or the answer "
        f"that they look for. Prompt {group.prompt.id!r}{gold} was completed with "
        f"{shorten(group.completions[0].text)!r}. Compare some rows of completions/; warm the "
        "policy up with lit-grpo sft, or set the reward to what the prompt asks for."
    )
