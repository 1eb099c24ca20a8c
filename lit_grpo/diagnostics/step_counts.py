"""Count what the checks need from the rollouts of a step, so that ranks can add up their counts.

One rank's groups may all have equal rewards while another rank's differ.
"""

from __future__ import annotations

import math
import operator
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from lit_grpo.objective.advantages import has_signal
from lit_grpo.types import Outcome, RolloutBatch, Score, TrainBatch

REPETITIVE, MIN_CHARACTERS = 0.15, 200
"""A completion of so many characters that compresses to such a share repeats itself."""

Scores = tuple[str, Outcome, bool]
"""The name of a reward, how scores of it ended, and whether by a bug of its code."""


def _merged_by(merge: Callable[[Any, Any], Any]) -> Any:
    return field(metadata={"merge": merge})


def _first_of_each(one: Mapping[Scores, str], other: Mapping[Scores, str]) -> dict[Scores, str]:
    return {**other, **one}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """Counts of a step's rollouts; ``+`` adds the counts of two ranks."""

    group_size: int = _merged_by(max)
    num_groups: int
    num_stale: int
    """Groups that were dropped since their weights were too old."""
    num_rows: int
    """Completions, sampled or not."""
    num_sampled: int
    num_truncated: int
    num_empty: int
    num_repetitive: int
    """Completions that repeat themselves; 0 if they were not counted."""

    num_valid: int
    reward_sum: float
    """Sum over the valid rows."""
    num_rewarded: int
    """Valid rows with a reward other than 0."""
    num_counted: int
    """Rows with something to be compared with, as in ``RolloutBatch.counted``."""
    num_with_signal: int
    """Groups whose rewards differ."""
    differing: tuple[str, ...] = _merged_by(lambda one, other: tuple(dict.fromkeys(one + other)))
    """Names of the rewards that differ inside a group."""

    best: float = _merged_by(max)
    """The highest reward; minus infinity without one."""
    worst: float = _merged_by(min)
    """The lowest reward; infinity without one."""
    equal: Counter[float]
    """Reward above 0 -> groups with all rows at that reward."""
    num_identical: int
    """Groups whose completions are all the same."""
    equal_identical: Counter[float]
    """Groups among them with equal rewards, as in ``equal``."""

    num_with_tokens: int
    lowest_logprob: float = _merged_by(min)
    """The lowest log-probability of a sequence."""
    largest_logprob: float = _merged_by(max)
    """The largest absolute value of one."""

    num_trained: int
    """Rows in the loss."""
    has_advantage: bool = _merged_by(operator.or_)
    """Whether one of them has an advantage other than 0."""

    asked: Counter[str]
    """The name of a reward -> scores of the sources that it is for."""
    failures: Counter[Scores]
    """Scores without a value."""
    details: Mapping[Scores, str] = _merged_by(_first_of_each)
    """The detail of one of each."""

    def __add__(self, other: StepCounts) -> StepCounts:
        def merge(name: str, by: Callable[[Any, Any], Any]) -> Any:
            return by(getattr(self, name), getattr(other, name))

        merged = {
            one.name: merge(one.name, one.metadata.get("merge", operator.add))
            for one in fields(self)
        }
        return StepCounts(**merged)

    @property
    def stale_fraction(self) -> float:
        return self.num_stale / max(1, self.num_groups)

    @property
    def truncated_fraction(self) -> float:
        return self.num_truncated / max(1, self.num_sampled)

    @property
    def empty_fraction(self) -> float:
        return self.num_empty / max(1, self.num_sampled)

    @property
    def repetitive_fraction(self) -> float:
        return self.num_repetitive / max(1, self.num_sampled)

    @property
    def identical_fraction(self) -> float:
        """The share of groups whose completions are all the same, except solved ones."""
        return (self.num_identical - self.equal_identical[self.best]) / max(1, self.num_groups)

    @property
    def only_reward(self) -> float | None:
        """The reward that every valid row of the step has; None if they differ or there is none."""
        return self.best if self.best == self.worst else None


def count_step(
    rollouts: RolloutBatch, batch: TrainBatch | None = None, *, with_repetition: bool = False
) -> StepCounts:
    """Count what one rank has sampled, and what it trains on.

    Args:
        batch: None if no optimizer step was taken.
        with_repetition: Whether to count the completions that repeat themselves, which compresses
            all their texts.
    """
    sampled = rollouts.sampled
    rewards, valid = rollouts.rewards, rollouts.valid
    is_identical = [len({c.token_ids for c in group.completions}) == 1 for group in rollouts.groups]
    equal = _equal_rewards(rewards, valid)
    logprobs = [sum(c.sampler_logprobs) for c in rollouts.completions if c.token_ids]
    trained = None if batch is None else batch.loss_mask.any(1)
    failures, details = count_scores(without_value(rollouts))
    return StepCounts(
        group_size=rollouts.group_size,
        num_groups=len(rollouts.groups),
        num_stale=len(rollouts.stale),
        num_rows=valid.numel(),
        num_sampled=len(sampled),
        num_truncated=sum(one.is_truncated for one in sampled),
        num_empty=sum(not one.text.strip() for one in sampled),
        num_repetitive=sum(_repeats_itself(one.text) for one in sampled) if with_repetition else 0,
        num_valid=int(valid.sum()),
        reward_sum=float(rewards[valid].sum()),
        num_rewarded=int((rewards[valid] != 0).sum()),
        num_counted=int(rollouts.counted.sum()),
        num_with_signal=int(has_signal(rewards, valid).sum()),
        differing=tuple(
            name
            for name, part in rollouts.parts.items()
            if has_signal(part, valid & ~part.isnan()).any()
        ),
        best=max(rewards[valid].tolist(), default=-math.inf),
        worst=min(rewards[valid].tolist(), default=math.inf),
        equal=Counter(equal.values()),
        num_identical=sum(is_identical),
        equal_identical=Counter(one for index, one in equal.items() if is_identical[index]),
        num_with_tokens=len(logprobs),
        lowest_logprob=min(logprobs, default=0.0),
        largest_logprob=max(map(abs, logprobs), default=0.0),
        num_trained=0 if trained is None else int(trained.sum()),
        has_advantage=batch is not None and bool(batch.advantages[trained].any()),
        asked=count_asked(rollouts),
        failures=failures,
        details=details,
    )


def _equal_rewards(rewards: Tensor, valid: Tensor) -> dict[int, float]:
    """Return the positive reward that all rows of a group have, by the index of the group."""
    is_equal = ~has_signal(rewards, valid) & valid.all(1) & (rewards > 0).all(1)
    return {int(index): float(rewards[index, 0]) for index in is_equal.nonzero()[:, 0]}


def count_asked(rollouts: RolloutBatch) -> Counter[str]:
    """Count by reward the scores of the sources that it is for."""
    asked: Counter[str] = Counter()
    for group in rollouts.groups:
        for name, scores in group.scores.items():
            asked[name] += sum(one.is_for_source for one in scores)
    return asked


def count_scores(scores: Iterable[tuple[str, Score]]) -> tuple[Counter[Scores], dict[Scores, str]]:
    """Count how scores of rewards ended, and return the detail of the first of each kind."""
    counts: Counter[Scores] = Counter()
    details: dict[Scores, str] = {}
    for name, score in scores:
        kind = name, score.outcome, bool(score.bug)
        counts[kind] += 1
        details.setdefault(kind, score.detail)
    return counts, details


def without_value(
    rollouts: RolloutBatch, rewards: Collection[str] | None = None
) -> Iterator[tuple[str, Score]]:
    """Yield the scores without a value, each with the name of its reward.

    A reward that declines a whole group does not apply to it. Its abstentions lack nothing on rows
    that other rewards have made valid, and are left out there.

    Args:
        rewards: Names of the rewards to look at; all of them if None.
    """
    for group, is_valid in zip(rollouts.groups, rollouts.valid.tolist(), strict=True):
        for name in group.scores if rewards is None else rewards:
            for score, counts in zip(group.scores[name], is_valid, strict=True):
                is_declined = counts and score.outcome is Outcome.ABSTAIN
                if score.is_for_source and not (score.is_ok or is_declined):
                    yield name, score


def _repeats_itself(text: str) -> bool:
    """Return whether a text is long and compresses to almost nothing."""
    data = text.encode()
    return len(data) >= MIN_CHARACTERS and len(zlib.compress(data)) < REPETITIVE * len(data)
