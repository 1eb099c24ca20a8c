"""Run ``lit-grpo precompute``: score the stored answers of rows, or say what that would cost."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from lit_grpo.cli.file_options import parse_options, same_recipe
from lit_grpo.cli.precompute.claims import Claims
from lit_grpo.cli.precompute.cost import SECONDS_PER_CALL, Estimate, estimate
from lit_grpo.cli.precompute.fingerprint import Scorer
from lit_grpo.cli.precompute.gold_cache import JudgeVotes
from lit_grpo.cli.precompute.judge_gold import JudgeRound, Tally, with_share
from lit_grpo.cli.precompute.progress import VoteProgress
from lit_grpo.cli.precompute.votes import Call, missing_calls
from lit_grpo.cli.prepare.collect import collect
from lit_grpo.cli.prepare.join_gold import can_be_judged
from lit_grpo.cli.prepare.recipe import Recipe, read_recipe
from lit_grpo.cli.prepare.rows import PreparedRow
from lit_grpo.runs.tables import add_numbers, make_table, open_console
from lit_grpo.stopping import ExitCode, exit_code_of_signal
from lit_grpo.types import check_range


def precompute(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code.

    Raises:
        UserError: the arguments, the recipe, its data, the cache or the judge are wrong.
    """
    given = parse_options("precompute", arguments)
    check_range("limit", given.limit, at_least=1)
    check_range("processes", given.processes, at_least=1)
    recipe = read_recipe(given.preset, given.data)
    cache = Path(given.cache or recipe.gold.cache)
    rows = _rows(recipe, given)
    return _judge(_open_rows(rows, recipe), recipe, cache, given)


def _rows(recipe: Recipe, given: Namespace) -> list[PreparedRow]:
    """Return the first rows of each source."""
    found: list[PreparedRow] = []
    for name, source in recipe.sources.items():
        found += collect(name, source, given.bad_rows).rows[: given.limit]
    return found


def _open_rows(rows: Sequence[PreparedRow], recipe: Recipe) -> list[PreparedRow]:
    """Return the rows that a judge has to score."""
    return [
        row
        for row in rows
        if row.kind == "open"
        and recipe.sources[row.source].needs_gold
        and row.columns.get("gold_scores") is None
    ]


def _judge(rows: Sequence[PreparedRow], recipe: Recipe, cache: Path, given: Namespace) -> int:
    """Ask the judge for the missing votes on rows, or say what that takes."""
    console = open_console()
    comparable = [row for row in rows if can_be_judged(row)]
    scorer = Scorer.of(recipe)
    scorer = replace(scorer, judge=with_share(scorer.judge, given.processes))
    directory = scorer.directory(cache)
    with closing(JudgeVotes(directory)) as votes:

        def calls() -> Iterator[Call]:
            return missing_calls(comparable, recipe.gold, votes)

        expected = estimate(calls(), scorer)
        counts = {"rows": len(comparable), "skipped": len(rows) - len(comparable)}
        if given.dry_run:
            _print_plan(counts, expected, scorer, given, console)
            return ExitCode.DONE
        if not expected.num_calls:
            _print_result(counts, Tally(), votes, 0, given, console)
            return ExitCode.DONE
        scorer.write(directory)
        with (
            closing(Claims(directory)) as claims,
            VoteProgress(votes, expected.num_votes, scorer.judge.price is not None) as progress,
        ):
            tally = asyncio.run(JudgeRound(scorer, votes, claims, progress.show).run(calls()))
        left = sum(len(call.answers) for call in calls())
        _print_result(counts, tally, votes, left, given, console)
    if tally.signal is not None:
        return exit_code_of_signal(tally.signal)
    return ExitCode.SCORES_ABSENT if left else ExitCode.DONE


def _print_plan(
    counts: Mapping[str, int],
    expected: Estimate,
    scorer: Scorer,
    given: Namespace,
    console: Console,
) -> None:
    if given.json:
        print(json.dumps({**counts, **expected.as_dict()}, indent=1))
        return
    limit = scorer.judge.limits.max_cost_usd
    dollars = "unknown: no price" if expected.dollars is None else f"{expected.dollars:,.2f}"
    table = make_table("rows")
    add_numbers(table, "calls", "votes", "prompt tokens", "reply tokens", "US dollars", "hours")
    table.add_row(
        f"{counts['rows']:,}",
        f"{expected.num_calls:,}",
        f"{expected.num_votes:,}",
        *(f"{round(one):,}" for one in (expected.prompt_tokens, expected.reply_tokens)),
        dollars,
        f"{expected.seconds / 3600:.2f}",
    )
    console.print(table)
    console.print(
        "estimated: four characters a token, 256 tokens a reply, and "
        f"{SECONDS_PER_CALL:g} s a call within the limits of the judge",
        soft_wrap=True,
    )
    if limit is not None and expected.dollars is not None and expected.dollars > limit:
        console.print(
            f"limits.max_cost_usd is {limit:g}: it would stop before the end", soft_wrap=True
        )
    _print_skipped(counts, console)


def _print_result(
    counts: Mapping[str, int],
    tally: Tally,
    votes: JudgeVotes,
    num_left: int,
    given: Namespace,
    console: Console,
) -> None:
    if given.json:
        result: dict[str, Any] = {
            **counts,
            "asked": tally.num_votes,
            "failures": {str(one): number for one, number in tally.failures.items()},
            "left": num_left,
            "dollars": round(votes.spent_usd, 4),
            "stopped": tally.stopped,
        }
        print(json.dumps(result, indent=1))
        return
    console.print(
        f"{tally.num_votes:,} votes recorded for {counts['rows']:,} rows; "
        f"{num_left:,} are missing; {votes.spent_usd:.4f} US dollars spent in all",
        soft_wrap=True,
    )
    for outcome, number in tally.failures.items():
        console.print(f"{number:,} failed: {outcome}: {tally.details[outcome]}", soft_wrap=True)
    if tally.stopped:
        console.print(f"stopped: {tally.stopped}", soft_wrap=True)
    _print_skipped(counts, console)
    following = same_recipe("precompute" if num_left else "prepare", given)
    following += "" if num_left else " --out prepared"
    console.print(f"next: {following}", soft_wrap=True)


def _print_skipped(counts: Mapping[str, int], console: Console) -> None:
    if counts["skipped"]:
        console.print(
            f"{counts['skipped']:,} rows have fewer than two answers and cannot be compared",
            soft_wrap=True,
        )
