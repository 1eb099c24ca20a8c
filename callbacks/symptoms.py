"""What one rollout step shows of its health, in numbers and in words. Judges; warns nobody."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from lit_grpo.types import Group, Outcome, RolloutBatch, Score

MOST = 0.5
"""From this share of a step on, a symptom is called the likely cause."""

SHOWN_CHARACTERS = 120

ADVICE = {
    Outcome.ERROR: "Look at its service and its credentials",
    Outcome.TIMEOUT: "Look at its service, or give it more time",
    Outcome.RATE_LIMITED: "Lower its concurrency or raise its quota",
    Outcome.PARSE_ERROR: "Look at what it is asked and what it answers",
    Outcome.ABSTAIN: "Look at why it declines to score these prompts",
    Outcome.TRUNCATED: "Raise model.sampling.max_tokens, or let it score truncated completions",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The most common way in which a reward failed to give a value."""

    reward: str
    outcome: Outcome
    fraction: float
    """Of this reward's scores, those that ended this way."""
    detail: str
    """What one of them says."""

    def __str__(self) -> str:
        sample = f", for instance: {shorten(self.detail)}" if self.detail else ""
        return (
            f"{self.fraction:.0%} of the scores of reward {self.reward!r} ended as "
            f"{self.outcome}{sample}. {ADVICE[self.outcome]}."
        )


def find_failure(rollouts: RolloutBatch) -> Failure | None:
    """The failing outcome that most rows share; None where every score has a value."""
    counts: Counter[tuple[str, Outcome]] = Counter()
    details: dict[tuple[str, Outcome], str] = {}
    num_rows = 0
    for group in rollouts.groups:
        num_rows += len(group.completions)
        for name, score in _failed_scores(group):
            counts[name, score.outcome] += 1
            details.setdefault((name, score.outcome), score.detail)
    if not counts:
        return None
    (name, outcome), count = counts.most_common(1)[0]
    return Failure(
        reward=name, outcome=outcome, fraction=count / num_rows, detail=details[name, outcome]
    )


def _failed_scores(group: Group) -> list[tuple[str, Score]]:
    return [(n, score) for n, scores in group.scores.items() for score in scores if not score.is_ok]


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


def shorten(text: str) -> str:
    """The end of a long text: that is where an error's cause and an answer stand."""
    text = text.strip()
    return text if len(text) <= SHOWN_CHARACTERS else "…" + text[-SHOWN_CHARACTERS:]
