"""Diagnose a step or a run: findings, their causes, and what to do about them."""

from lit_grpo.diagnostics.causes import CAUSES, Action, Cause, cause_of_exit
from lit_grpo.diagnostics.counts import StepCounts, count_step
from lit_grpo.diagnostics.step import (
    LIKELY_FRACTION,
    Failure,
    advice_on,
    empty_fraction,
    find_failure,
    how_it_began,
    is_stale,
    likely_causes,
    no_signal,
    sample_completions,
    shorten,
    truncated_fraction,
)
from lit_grpo.diagnostics.step_log import StepLog, step_number
from lit_grpo.diagnostics.waits import describe_wait

__all__ = [
    "CAUSES",
    "LIKELY_FRACTION",
    "Action",
    "Cause",
    "Failure",
    "StepCounts",
    "StepLog",
    "advice_on",
    "cause_of_exit",
    "count_step",
    "describe_wait",
    "empty_fraction",
    "find_failure",
    "how_it_began",
    "is_stale",
    "likely_causes",
    "no_signal",
    "sample_completions",
    "shorten",
    "step_number",
    "truncated_fraction",
]
