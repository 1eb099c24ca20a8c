"""Explain why a rollout step waits for its rewards, and how to shorten the wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping

SLOW_FRACTION = 0.5
"""A wait for rewards of at least this share of the step is long."""
MIN_STEP_SECONDS = 1.0
"""Waits in shorter steps are not reported."""

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
        "Raise the deployment's quota, or set the judge's limits.requests_per_minute and "
        "limits.tokens_per_minute to that quota, so that no call is refused",
    ),
}
"""Cause of a wait -> how it is named, and what to do."""


def describe_wait(
    metrics: Mapping[str, float],
    exposed_seconds: float,
    step_seconds: float,
    describe_slowest: Callable[[], str] = str,
) -> str | None:
    """Return why a step spent most of its time waiting for rewards; None if it did not.

    Args:
        describe_slowest: Returns which reward takes longest, and what to do; called for a long wait
            without a judge.
    """
    if step_seconds < MIN_STEP_SECONDS or exposed_seconds < SLOW_FRACTION * step_seconds:
        return None
    held = longest_wait(metrics)
    spent = f"The step spent {exposed_seconds:.1f} of its {step_seconds:.1f} s waiting for rewards"
    answering = _answering_seconds(metrics)
    if held is not None:
        resource, advice = WAITS[held[0]]
        return (
            f"{spent}. Calls to the judge are held back: over all calls, {held[1]:.0f} s were "
            f"spent waiting for {resource}, {answering:.0f} s waiting for replies. {advice}."
        )
    if answering:
        return (
            f"{spent}. The judge's replies take long: "
            f"{metrics['timing/judge_api_latency_s']:.1f} s per call. Raise limits.max_concurrency "
            "if its quota allows, use a faster model, or ask for shorter replies."
        )
    columns = "The columns seconds/NAME in completions/ show the seconds of each call."
    return " ".join(filter(None, (f"{spent}.", describe_slowest(), columns)))


def longest_wait(metrics: Mapping[str, float]) -> tuple[str, float] | None:
    """Return what held the calls of judges back longest, a key of `WAITS`, and for how long.

    The seconds are summed over all calls. None if the calls spent more time waiting for replies.
    """
    waits = {cause: metrics.get(f"timing/judge_wait_{cause}_s", 0.0) for cause in WAITS}
    cause = max(waits, key=lambda one: waits[one])
    return (cause, waits[cause]) if waits[cause] > _answering_seconds(metrics) else None


def why_judges_are_slow(metrics: Mapping[str, float], seconds: float) -> str:
    """Return why a stage that waits for rewards takes so long, if a judge is the reason, else "".

    Args:
        seconds: Duration of the stage. Calls overlap, so their seconds add up to more.
    """
    held, answering = longest_wait(metrics), _answering_seconds(metrics)
    if held is not None and held[1] >= SLOW_FRACTION * seconds:
        resource, advice = WAITS[held[0]]
        return (
            f": the judge's calls waited {held[1]:.0f} s, over all calls, for {resource}. {advice}"
        )
    if answering >= SLOW_FRACTION * seconds:
        latency = metrics["timing/judge_api_latency_s"]
        return f": the judge's replies take {latency:.1f} s per call"
    return ""


def _answering_seconds(metrics: Mapping[str, float]) -> float:
    """Return for how long the calls of judges waited for replies, over all calls."""
    return metrics.get("timing/judge_api_latency_s", 0.0) * metrics.get("judge/calls", 0.0)
