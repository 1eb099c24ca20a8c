"""Count what judging used since the last report: calls, waits, tokens and cost."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from lit_grpo.judge.budget import Cause
from lit_grpo.judge.config import Price
from lit_grpo.types import Measurements

MILLION = 1e6
COUNTS = ("calls", "retries", "rate_limited", "parse_errors", "cache_hits")
TOKENS = ("prompt_tokens", "cached_prompt_tokens", "completion_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The tokens of one call."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    """Prompt tokens that the server had in its cache."""
    completion_tokens: int = 0

    @classmethod
    def of(cls, usage: Any) -> Usage:
        """Read the ``usage`` of a reply of the openai package; what it does not count is 0.

        A negative number, which some servers report for one that they do not know, makes the whole
        usage as good as none.
        """
        details = getattr(usage, "prompt_tokens_details", None)
        prompt, completion = _number(usage, "prompt_tokens"), _number(usage, "completion_tokens")
        cached = _number(details, "cached_tokens")
        if min(prompt, completion) < 0:
            return cls()
        return cls(
            prompt_tokens=prompt,
            cached_prompt_tokens=cached if 0 <= cached <= prompt else 0,
            completion_tokens=completion,
        )

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def cost(self, price: Price | None) -> float:
        """Return the cost in US dollars; 0 without a price."""
        if price is None:
            return 0.0
        cached = price.prompt if price.cached_prompt is None else price.cached_prompt
        fresh_tokens = self.prompt_tokens - self.cached_prompt_tokens
        dollars = fresh_tokens * price.prompt + self.cached_prompt_tokens * cached
        return (dollars + self.completion_tokens * price.completion) / MILLION


def _number(counts: Any, name: str) -> int:
    """Return a count of tokens; 0 if it is missing or no finite number."""
    found = getattr(counts, name, None)
    return int(found) if isinstance(found, int | float) and isfinite(found) else 0


@dataclass(slots=True)
class Ledger:
    """Totals and samples since the last ``read``, by metric name."""

    totals: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    samples: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def count(self, name: str, amount: float = 1) -> None:
        """Add to the total ``judge/<name>``."""
        self.totals[f"judge/{name}"] += amount

    def sample(self, name: str, value: float) -> None:
        self.samples[name].append(value)

    def add_usage(self, usage: Usage, cost: float) -> None:
        """Count the tokens and the cost of a call."""
        for name in TOKENS:
            self.count(name, getattr(usage, name))
        self.count("cost_usd", cost)

    def add_waits(self, waited: dict[Cause, float]) -> None:
        """Count the seconds that a call waited before it started, by cause."""
        self.sample("timing/semaphore_wait_s", sum(waited.values()))
        for cause, seconds in waited.items():
            self.totals[f"timing/judge_wait_{cause}_s"] += seconds

    def read(self) -> Measurements:
        """Return everything since the last call and start again; unchanged counts are 0."""
        zeros = dict.fromkeys((f"judge/{name}" for name in (*COUNTS, *TOKENS, "cost_usd")), 0.0)
        # Swapped before they are read, since another thread may be writing.
        totals, self.totals = self.totals, defaultdict(float)
        samples, self.samples = self.samples, defaultdict(list)
        return Measurements(totals=zeros | totals, samples=dict(samples))
