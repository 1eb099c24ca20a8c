"""Why a step waited for its rewards, in words, and what to change. Judges; warns nobody."""

from __future__ import annotations

from collections.abc import Mapping

MOST = 0.5
"""From this share of the step on, the wait for rewards is what makes it slow."""

WAITS = {
    "max_concurrency": (
        "a free slot (limits.max_concurrency)",
        "Raise limits.max_concurrency of the judge as far as its quota allows, or have several "
        "completions share a call",
    ),
    "requests_per_minute": (
        "limits.requests_per_minute",
        "Have several completions share a call, or raise the deployment's quota and "
        "limits.requests_per_minute with it",
    ),
    "tokens_per_minute": (
        "limits.tokens_per_minute",
        "Shorten the template and the completions, or raise the deployment's quota and "
        "limits.tokens_per_minute with it",
    ),
    "retry_after": (
        "the server, which answered 429 and asked to wait (Retry-After)",
        "Raise the deployment's quota, or set limits.requests_per_minute and "
        "limits.tokens_per_minute of the judge to what it is, so that no call is refused",
    ),
}
"""What a call waited for -> its name, and what to do."""


def describe_wait(
    metrics: Mapping[str, float], exposed_seconds: float, step_seconds: float
) -> str | None:
    """Why most of a step went into waiting for rewards; None when it did not."""
    if exposed_seconds < MOST * step_seconds:
        return None
    spent = f"{exposed_seconds:.1f} of the step's {step_seconds:.1f} s were a wait for rewards"
    waits = {cause: metrics.get(f"timing/judge_wait_{cause}_s", 0.0) for cause in WAITS}
    cause = max(waits, key=lambda one: waits[one])
    answering = metrics.get("timing/judge_api_latency_s", 0.0) * metrics.get("judge/calls", 0.0)
    if waits[cause] > answering:
        place, advice = WAITS[cause]
        return (
            f"{spent}. The judge's rate limit is the bottleneck: its calls waited "
            f"{waits[cause]:.0f} s for {place} and {answering:.0f} s for answers, all added up. "
            f"{advice}."
        )
    if answering:
        return (
            f"{spent}. The judge's answers take long, "
            f"{metrics['timing/judge_api_latency_s']:.1f} s a call. Raise limits.max_concurrency "
            "if its quota allows, ask a faster model, or shorten what it writes."
        )
    return (
        f"{spent}. timing/reward_total_duration_s and the seconds of each reward say which one. A "
        "sync reward has one thread: make it async, or run it in several processes with "
        "ProcessReward."
    )
