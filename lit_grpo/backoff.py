"""How long to wait before a further attempt. Waits for nothing itself."""

from __future__ import annotations

import random

jitter = random.Random()
"""A generator of its own: the global one belongs to the run's seed."""


def backoff(num_failures: int, first: float, longest: float) -> float:
    """Seconds before the next attempt: ``first`` after one failure, twice as long after each
    further one, give or take half; jitter keeps those that failed together apart."""
    return min(first * 2 ** (num_failures - 1), longest) * jitter.uniform(0.5, 1.5)
