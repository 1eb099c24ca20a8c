"""Run ``lit-grpo precompute``: score the stored answers of rows, or say what that would cost."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from lit_grpo.cli.file_options import parse_options, same_recipe
from lit_grpo.cli.precompute.claims import Claims
from lit_grpo.cli.precompute.cost import estimate
from lit_grpo.cli.precompute.judge_gold import JudgeRound, VoteCounts, with_share
from lit_grpo.cli.precompute.program_gold import Checks, check_rows, unchecked
from lit_grpo.cli.precompute.progress import VoteProgress
from lit_grpo.cli.precompute.summary import DryRun, Result, print_plan, print_result
from lit_grpo.cli.precompute.votes import VoteCall, missing_calls
from lit_grpo.cli.prepare.collect import collect
from lit_grpo.cli.prepare.fingerprint import Scorer
from lit_grpo.cli.prepare.gold_cache import CheckedAnswers, JudgeVotes
from lit_grpo.cli.prepare.join_gold import can_be_judged
from lit_grpo.cli.prepare.recipe import Recipe, read_recipe
from lit_grpo.cli.prepare.rows import PreparedRow, from_prepared
from lit_grpo.data.rows.prepared import find_prepared
from lit_grpo.runs.files.writable import check_writable
from lit_grpo.runs.tables import open_console
from lit_grpo.stopping import ExitCode, exit_code_of_signal
from lit_grpo.types import UserError, check_range


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsToScore:
    """The rows of a recipe that need gold scores."""

    recipe: Recipe
    cache: Path
    judged: Sequence[PreparedRow]
    """Open rows with two stored answers or more."""
    checked: Mapping[str, Sequence[PreparedRow]]
    """Verifiable rows by source."""
    num_given: int
    """Rows that have their gold scores already."""
    num_single: int
    """Open rows with fewer than two stored answers."""
    lacks_source: bool
    """Whether a source has only such rows."""
    num_processes: int

    def calls(self, votes: JudgeVotes) -> Iterator[VoteCall]:
        """Yield the calls for the votes that are missing."""
        return missing_calls(self.judged, self.recipe.gold, votes)

    def scorer(self) -> Scorer:
        """Return the judge with this process's share of its limits."""
        scorer = Scorer.of(self.recipe)
        return replace(scorer, judge=with_share(scorer.judge, self.num_processes))


def precompute(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code.

    Raises:
        UserError: the arguments, the recipe, its data, the cache or the judge are wrong.
    """
    given = parse_options("precompute", arguments)
    check_range("limit", given.limit, at_least=1)
    check_range("processes", given.processes, at_least=1)
    sys.path.insert(0, os.getcwd())  # for a verifier of the user
    work = _find_work(given)
    console = open_console()
    if given.dry_run:
        plan = _plan(work)
        if given.json:
            print(json.dumps(plan.as_dict(), indent=1))
        else:
            print_plan(plan, console)
        return ExitCode.DONE
    result = _judge(work, _check(work))
    if given.json:
        print(json.dumps(result.as_dict(), indent=1))
    else:
        print_result(result, _following(result, work, given), console)
    if result.counts.signal is not None:
        return exit_code_of_signal(result.counts.signal)
    is_complete = not (result.num_left or result.checks.lacks_needed)
    return ExitCode.DONE if is_complete else ExitCode.SCORES_ABSENT


def _following(result: Result, work: RowsToScore, given: Namespace) -> str:
    """Return what comes next: a command, or what to do about rows that prepare refuses."""
    if result.num_left:
        return same_recipe("precompute", given)
    if given.cache and not work.cache.is_dir():  # nothing was missing, and prepare refuses it
        given.cache = None
    prepare = f"{same_recipe('prepare', given)} --out prepared"
    if not (result.num_single or result.checks.lacks_needed):
        return prepare
    repair = "repair or remove the rows without gold scores"
    if work.lacks_source or result.checks.lacks_source:
        return f"{repair}, since a source has no others"
    return f"{repair}, or leave them out by {prepare} --only_cached"


def _find_work(given: Namespace) -> RowsToScore:
    """Return the rows that need scores, of the first ones of each source."""
    recipe = read_recipe(given.preset, given.data)
    found = _prepared_rows(given.prepared) if given.prepared else _source_rows(recipe, given)
    judged: list[PreparedRow] = []
    checked: dict[str, list[PreparedRow]] = {}
    num_open = num_given = 0
    lacks_source = False
    for name, all_rows in found.items():
        first = all_rows[: given.limit]
        rows = [row for row in first if row.columns.get("gold_scores") is None]
        num_given += len(first) - len(rows)
        if name not in recipe.sources:
            raise UserError(
                f"{given.prepared} must have the sources of the recipe, got another, {name!r}. "
                "Set --preset to the recipe that it was prepared by."
            )
        if recipe.sources[name].kind == "verifiable":
            checked[name] = rows
        else:
            comparable = [*filter(can_be_judged, rows)]
            judged += comparable
            num_open += len(rows)
            lacks_source |= not comparable and len(rows) == len(all_rows)
    return RowsToScore(
        recipe=recipe,
        cache=Path(given.cache or recipe.gold.cache).expanduser(),
        judged=judged,
        checked=checked,
        num_given=num_given,
        num_single=num_open - len(judged),
        lacks_source=lacks_source,
        num_processes=given.processes,
    )


def _source_rows(recipe: Recipe, given: Namespace) -> dict[str, Sequence[PreparedRow]]:
    """Return the rows by source, without those that need no scores."""
    return {
        name: collect(name, source, given.bad_rows, given.preset).rows
        for name, source in recipe.sources.items()
        if source.scored is not False
    }


def _prepared_rows(directory: str) -> dict[str, list[PreparedRow]]:
    """Return the rows of prepared data by source, whether or not they need scores."""
    prepared = find_prepared(directory)
    if prepared is None:
        raise UserError(
            f"prepared must be a directory that lit-grpo prepare has written, got {directory}. "
            "Set --prepared, or leave it out to read the sources of the recipe."
        )
    found: dict[str, list[PreparedRow]] = {}
    for split in prepared.splits:
        for row in map(from_prepared, prepared.split(split).rows()):
            found.setdefault(row.source, []).append(row)
    return found


def _plan(work: RowsToScore) -> DryRun:
    """Return the missing votes and their cost, without calling a judge or writing a file."""
    expected = limit = None
    if work.judged:
        scorer = work.scorer()
        votes = JudgeVotes(scorer.directory(work.cache))
        expected = estimate(work.calls(votes), scorer)
        limit = scorer.judge.limits.max_cost_usd
    cache = CheckedAnswers(work.cache)
    sources = work.recipe.sources
    num_unchecked = sum(
        len(unchecked(rows, sources[name].verifier, cache)) for name, rows in work.checked.items()
    )
    return DryRun(
        num_rows=len(work.judged),
        num_given=work.num_given,
        num_single=work.num_single,
        num_unchecked=num_unchecked,
        expected=expected,
        max_cost_usd=limit,
    )


def _check(work: RowsToScore) -> Checks:
    """Let programs score the answers to verifiable rows."""
    checks = Checks()
    console = Console(stderr=True)
    with (
        closing(CheckedAnswers(work.cache)) as cache,
        Progress(console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        for name, rows in work.checked.items():
            source = work.recipe.sources[name]
            left = unchecked(rows, source.verifier, cache)
            if left:
                check_writable("--cache", work.cache, work.cache)
            bar = progress.add_task(f"checking {name}", total=len(left))
            of_source = Checks()
            for batch in check_rows(left, source.verifier, cache, rows) if left else ():
                of_source.add(batch)
                progress.update(bar, completed=of_source.num_done)
            checks.add_source(of_source, len(rows), source.needs_gold)
    return checks


def _judge(work: RowsToScore, checks: Checks) -> Result:
    """Ask the judge for the votes that are missing."""
    if not work.judged:
        return Result(num_given=work.num_given, num_single=work.num_single, checks=checks)
    scorer = work.scorer()
    directory = scorer.directory(work.cache)
    with closing(JudgeVotes(directory)) as votes:
        num_missing = sum(len(call.answers) for call in work.calls(votes))
        counts = VoteCounts()
        if num_missing:
            check_writable("--cache", work.cache, work.cache)
            scorer.write(directory)
            with (
                closing(Claims(directory)) as claims,
                VoteProgress(votes, num_missing, scorer.judge.price is not None) as progress,
            ):
                judging = JudgeRound(scorer, votes, claims, progress.show)
                counts = asyncio.run(judging.run(work.calls(votes)))
        return Result(
            num_rows=len(work.judged),
            num_given=work.num_given,
            num_single=work.num_single,
            num_left=sum(len(call.answers) for call in work.calls(votes)),
            spent_usd=None if scorer.judge.price is None else votes.spent_usd,
            counts=counts,
            checks=checks,
        )
