"""The score of a completion: a value, or the outcome that says why there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from lit_grpo.types.text import encodable


class Outcome(StrEnum):
    """The result of one attempt to score one completion. Only OK carries a value."""

    OK = "ok"
    ABSTAIN = "abstain"
    """The reward does not apply to this completion."""
    TIMEOUT = "timeout"
    RATE_LIMITED = "rate_limited"
    UNAVAILABLE = "unavailable"
    """The service could not be reached, or answered with a server error (5xx)."""
    CONTENT_FILTERED = "content_filtered"
    OUT_OF_TOKENS = "out_of_tokens"
    """The judge's reply was cut off at its token limit."""
    PARSE_ERROR = "parse_error"
    BUDGET_SPENT = "budget_spent"
    ERROR = "error"
    TRUNCATED = "truncated"
    """Prompt and completion are longer than the reward can read."""
    NOT_SAMPLED = "not_sampled"
    """The engine gave no completion to score."""
    OTHER_SOURCE = "other_source"
    """The reward is only for other sources of the mixture, and was not asked."""

    @property
    def is_failure(self) -> bool:
        """Whether there is no value although the reward applies."""
        return self not in (Outcome.OK, Outcome.ABSTAIN, Outcome.OTHER_SOURCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One reward's score of one completion: a value, or the reason why there is none.

    A failure is never a zero: it has no value at all.

    Raises:
        ValueError: OK without a finite value, or another outcome with a value.
    """

    value: float | None
    outcome: Outcome = Outcome.OK
    detail: str = ""
    seconds: float = 0.0
    cost: float = 0.0
    """US dollars."""
    steps: tuple[tuple[int, float], ...] = ()
    """(index of a token, the part of the value that comes at it), for ``advantage.discount``. The
    rest of the value, if any, comes at the last token."""
    num_values: int | None = None
    """Tokens that `by_token` was given values for; None for any other score."""
    bug: str = ""
    """The traceback, or the wrong value, if a mistake in the reward's code caused the failure."""
    is_permanent: bool = False
    """Whether a retry would fail as well: a bug of a sync reward, whose code waits for no service
    that may recover."""

    def __post_init__(self) -> None:
        for name in ("detail", "bug"):
            object.__setattr__(self, name, encodable(getattr(self, name)))
        if self.outcome is Outcome.OK:
            if self.value is None or not -float("inf") < self.value < float("inf"):
                raise ValueError(
                    f"a score that is ok needs a finite value, got {self.value} "
                    "(return None for a completion that could not be scored)"
                )
        elif self.value is not None:
            raise ValueError(
                f"a score with outcome {self.outcome} must have no value, got {self.value} "
                "(a failure is never a number)"
            )

    @classmethod
    def by_token(cls, values: Sequence[float | None]) -> Score:
        """Return the score of a completion whose tokens have values of their own.

        Args:
            values: [C] the value that comes at each token; None where none does.
        """
        steps = tuple((index, float(v)) for index, v in enumerate(values) if v is not None)
        total = sum(value for _, value in steps)
        return cls(value=total, steps=steps, num_values=len(values))

    @property
    def is_ok(self) -> bool:
        return self.outcome is Outcome.OK

    @property
    def is_for_source(self) -> bool:
        """Whether the reward is for the source of the prompt."""
        return self.outcome is not Outcome.OTHER_SOURCE

    @property
    def is_failure(self) -> bool:
        """Whether there is no value although the reward applies."""
        return self.outcome.is_failure

    @property
    def is_scorable(self) -> bool:
        """Whether there is a completion that the reward can read and is for."""
        return self.is_for_source and self.outcome not in (Outcome.TRUNCATED, Outcome.NOT_SAMPLED)

    @property
    def is_outage(self) -> bool:
        """Whether the failure lies outside the completion, so a retry may succeed."""
        return self.is_failure and self.is_scorable and not self.is_permanent


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Values that a reward or an engine measured, by the name of the metric.

    Values are collected over the rollout step and all ranks.
    """

    totals: Mapping[str, float] = field(default_factory=dict)
    """Logged as their sum."""
    means: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Logged as their mean."""
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Logged as their mean and, with ``_p95`` after the name, as their 95th percentile."""
