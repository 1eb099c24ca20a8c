"""Estimate how long calls take within the limits of a judge."""

from __future__ import annotations

from lit_grpo.judge.config import Limits

SECONDS_PER_MINUTE = 60


def seconds_of_calls(
    limits: Limits, num_calls: float, num_tokens: float, seconds_per_call: float
) -> float:
    """Return the seconds that calls take, whichever limit holds them up most.

    Example: 64 calls of 2 s, with a concurrency of 4 and 30 requests per minute, take
    max(64 * 2 / 4, 64 / 30 * 60) = 128 s.

    Args:
        limits: The judge's limits.
        num_calls: Number of calls.
        num_tokens: Tokens of all calls.
        seconds_per_call: Mean time of a call.
    """
    bounds = [num_calls * seconds_per_call / limits.max_concurrency]
    if limits.requests_per_minute:
        bounds.append(num_calls / limits.requests_per_minute * SECONDS_PER_MINUTE)
    if limits.tokens_per_minute:
        bounds.append(num_tokens / limits.tokens_per_minute * SECONDS_PER_MINUTE)
    return max(bounds)
