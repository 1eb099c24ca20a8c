"""Print the result of precompute: the missing votes and their cost, or what was recorded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from lit_grpo.cli.precompute.cost import SECONDS_PER_CALL, CostEstimate
from lit_grpo.cli.precompute.judge_gold import VoteCounts
from lit_grpo.cli.precompute.program_gold import Checks
from lit_grpo.runs.tables import add_numbers, make_table

IDS_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """Findings of a dry run."""

    num_rows: int
    """Open rows whose answers a judge compares."""
    num_given: int
    """Rows whose gold scores are in the data."""
    num_single: int
    """Open rows with fewer than two answers."""
    num_unchecked: int
    """Verifiable rows whose answers no program has checked."""
    expected: CostEstimate | None
    """None without open rows."""
    max_cost_usd: float | None

    def as_dict(self) -> dict[str, Any]:
        expected = {} if self.expected is None else self.expected.as_dict()
        return {
            "rows": self.num_rows,
            "given": self.num_given,
            "single": self.num_single,
            "unchecked": self.num_unchecked,
            **expected,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Results of a run."""

    checks: Checks
    num_rows: int = 0
    num_given: int = 0
    num_single: int = 0
    num_left: int = 0
    """Votes that are missing."""
    spent_usd: float | None = None
    """Dollars of this and all earlier runs; None if the judge has no price."""
    counts: VoteCounts = field(default_factory=VoteCounts)

    def as_dict(self) -> dict[str, Any]:
        return {
            "rows": self.num_rows,
            "given": self.num_given,
            "single": self.num_single,
            "asked": self.counts.num_votes,
            "failures": {str(one): number for one, number in self.counts.failures.items()},
            "left": self.num_left,
            "dollars": None if self.spent_usd is None else round(self.spent_usd, 4),
            "stopped": self.counts.stopped,
            "checked": self.checks.num_scored,
            "unchecked": {why: len(ids) for why, ids in self.checks.failures.items()},
        }


def print_plan(plan: DryRun, console: Console) -> None:
    """Print what is missing and what it takes."""
    if plan.expected is not None:
        _print_estimate(plan.num_rows, plan.expected, console)
        limit, dollars = plan.max_cost_usd, plan.expected.dollars
        if limit is not None and dollars is not None and dollars > limit:
            _say(f"limits.max_cost_usd is {limit:g}: it would stop before the end", console)
    if plan.num_unchecked:
        _say(f"{plan.num_unchecked:,} verifiable rows are left for a program to check", console)
    elif plan.expected is None and not (plan.num_given or plan.num_single):
        _say("nothing is missing", console)
    for line in (*_given(plan.num_given), *_single(plan.num_single)):
        _say(line, console)


def print_result(result: Result, following: str, console: Console) -> None:
    """Print what was done, and the command that comes next."""
    counts = result.counts
    if result.num_rows:
        spent = result.spent_usd
        cost = "" if spent is None else f"; {spent:.4f} US dollars spent in all"
        _say(
            f"{counts.num_votes:,} votes recorded for {result.num_rows:,} rows; "
            f"{result.num_left:,} are missing{cost}",
            console,
        )
    for outcome, number in counts.failures.items():
        _say(f"{number:,} failed: {outcome}: {counts.details[outcome]}", console)
    if counts.stopped:
        _say(f"stopped: {counts.stopped}", console)
    for line in (*_given(result.num_given), *_single(result.num_single), *_checked(result.checks)):
        _say(line, console)
    _say(f"next: {following}", console)


def _print_estimate(num_rows: int, expected: CostEstimate, console: Console) -> None:
    dollars = "unknown: no price" if expected.dollars is None else f"{expected.dollars:,.2f}"
    table = make_table("rows")
    add_numbers(table, "calls", "votes", "prompt tokens", "reply tokens", "US dollars", "hours")
    table.add_row(
        *(f"{one:,}" for one in (num_rows, expected.num_calls, expected.num_votes)),
        *(f"{round(one):,}" for one in (expected.prompt_tokens, expected.reply_tokens)),
        dollars,
        f"{expected.seconds / 3600:.2f}",
    )
    console.print(table)
    _say(
        "estimated: four characters a token, 256 tokens a reply, and "
        f"{SECONDS_PER_CALL:g} s a call within the limits of the judge",
        console,
    )


def _checked(checks: Checks) -> Iterator[str]:
    if checks.num_scored or checks.failures:
        yield f"{checks.num_scored:,} verifiable rows got gold by a program"
    for reason, ids in checks.failures.items():
        more = ", ..." * (len(ids) > IDS_SHOWN)
        yield f"{len(ids):,} got none: {reason} ({', '.join(ids[:IDS_SHOWN])}{more})"


def _given(number: int) -> Iterator[str]:
    if number:
        yield f"{number:,} rows have gold scores in the data: nothing is missing for them"


def _single(number: int) -> Iterator[str]:
    if number:
        yield f"{number:,} rows have fewer than two answers and cannot be compared"


def _say(line: str, console: Console) -> None:
    console.print(line, soft_wrap=True)
