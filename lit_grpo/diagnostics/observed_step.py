"""A finished rollout step, with the metrics of the steps before it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from lit_grpo.diagnostics.step_counts import StepCounts

MIN_STEPS = 10
"""Steps before a value counts as usual."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObservedStep:
    """A finished rollout step, and the metrics of the steps before it."""

    counts: StepCounts
    """Counts over all ranks."""
    metrics: Mapping[str, float]
    """The metrics of the step over all ranks, and ``seconds/<stage>`` of its stages."""
    past: Sequence[Mapping[str, float]] = ()
    """The metrics of the last steps, the oldest first."""
    reward_range: tuple[float, float] | None = None
    """The lowest and the highest reward of the run before this step; None if it had none."""
    num_skipped: int = 0
    """Optimizer steps in a row that were skipped until now, if those are too many, else 0."""
    weights_are_finite: bool = True
    can_end: bool = True
    """Whether anything but the token limit ends a completion."""

    def usual(self, name: str) -> float | None:
        """Return what a metric usually is; None if the past is short."""
        return usual_value(self.past, name)

    def has_grown(self, name: str) -> bool:
        """Return whether a count is larger than after the step before."""
        return bool(self.past) and self.metrics.get(name, 0) > self.past[-1].get(name, 0)

    def factor(self, name: str) -> float | None:
        """Return by how much a metric differs from the usual; None if that is not known."""
        usual, value = self.usual(name), self.metrics.get(name)
        return value / usual if value is not None and usual else None

    def num_steps_away(self, name: str) -> int:
        """Return for how many steps until now a metric has been away from its usual value.

        A value is away if it is nearer, as a factor, to the present than to the usual one.
        """
        usual, value = self.usual(name), self.metrics.get(name)
        if usual is None or value is None:
            return 1
        is_ratio = usual > 0 and value > 0
        middle = math.sqrt(usual * value) if is_ratio else (usual + value) / 2
        sign = 1 if value > usual else -1
        before = reversed([one.get(name, value) for one in self.past])
        return 1 + len(list(takewhile(lambda one: sign * one > sign * middle, before)))


def usual_value(past: Sequence[Mapping[str, float]], name: str) -> float | None:
    """Return the median of a metric over the older half of the past; None if it is short."""
    values = [step[name] for step in past if name in step]
    if len(values) < MIN_STEPS:
        return None
    return statistics.median(values[: len(values) // 2])
