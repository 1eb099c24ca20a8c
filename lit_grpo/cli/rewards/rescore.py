"""Run ``lit-grpo rescore``: score the logged completions of a run again, and compare.

Groups are those that were logged, which may differ in size between steps of a resumed run. Rows
whose prompt is no longer in the data are counted and left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pyarrow as pa
from rich.console import Console
from rich.progress import track

from lit_grpo.cli.errors import print_error
from lit_grpo.cli.rewards.changes import Comparison, Row, num_scored, print_changes
from lit_grpo.cli.rewards.failures import (
    failed_in_all,
    find_unreported,
    report_bugs,
    report_failures,
)
from lit_grpo.runs.files.completions import (
    completions_table,
    files_by_step,
    free_path,
    read_completions,
    split_groups,
    write_table,
)
from lit_grpo.runs.tables import open_console
from lit_grpo.stopping import ExitCode
from lit_grpo.training import GRPOModule
from lit_grpo.training.collecting.score_status import find_spent_budget
from lit_grpo.types import Completion, Prompt, RolloutBatch, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """The groups of one file whose prompts are in the data."""

    step: int
    groups: Sequence[Sequence[Row]]
    """The G rows of each prompt."""
    prompts: Sequence[Prompt]
    num_lost: int
    """Rows whose prompt is no longer in the data."""

    @property
    def rows(self) -> list[Row]:
        return [*chain.from_iterable(self.groups)]


def rescore(
    module: GRPOModule,
    run_dir: Path,
    find_prompts: Callable[[Collection[str]], Mapping[str, Prompt]],
    *,
    last: int | None,
    name: str,
) -> int:
    """Score the logged completions of a run, print what changed, and write the new scores.

    Return the exit code: 0; 4 if a judge's budget was spent before all rows were scored; or 1 if a
    reward failed on every completion.

    Args:
        module: The module with the rewards to score with.
        run_dir: Directory of the run.
        find_prompts: Reads the prompts with these ids, as far as they are in the data.
        last: Rescore only this many of the last rollout steps; None rescores all.
        name: Name of the file in ``rescored/``; numbered if it exists already.

    Raises:
        UserError: the run has no completions that can be scored again.
        RewardFailed: a reward with ``on_error: raise`` gave no value.
    """
    paths = logged_steps(run_dir, last)
    logged = [read_completions(path, ["prompt_id"])["prompt_id"].to_pylist() for path in paths]
    prompts = find_prompts(set(chain.from_iterable(logged)))
    steps = [read_step(path, prompts) for path in paths]
    num_lost = sum(step.num_lost for step in steps)
    steps = [step for step in steps if step.groups]
    if not steps:
        raise UserError(
            f"{run_dir}: none of the prompts of the {num_lost} logged completions is in the data, "
            "so nothing can be rescored. Use the data settings of the run."
        )
    rollouts = _score_again(module, steps)
    tables = [completions_table(step.step, one) for step, one in zip(steps, rollouts, strict=True)]
    table = pa.concat_tables(tables, promote_options="default")
    before = [row for step in steps for row in step.rows]
    path = free_path(run_dir / "rescored" / f"{name}.parquet")
    write_table(_with_old(table, before), path)
    comparison = Comparison(
        before=before,
        after=table.drop_columns(["token_ids"]).to_pylist(),
        group_sizes=[len(group) for step in steps for group in step.groups],
    )
    lines = [*_missing_rows(num_lost, rollouts), f"Completions: {path}"]
    if num_scored(comparison):
        _print_comparison(comparison, lines)
        return _report(rollouts)
    exit_code = _report(rollouts)  # first, since it is why there is nothing to compare
    _print_comparison(comparison, lines)
    return exit_code


def _print_comparison(comparison: Comparison, lines: Sequence[str]) -> None:
    console = open_console()
    print_changes(console, comparison)
    for line in lines:
        console.print(line, soft_wrap=True)


def _report(rollouts: Sequence[RolloutBatch]) -> int:
    """Print which rewards failed, and return the exit code."""
    if spent := _describe_spent_budget(rollouts):
        report_bugs(rollouts)
        return print_error(spent, ExitCode.SCORES_ABSENT)
    return report_failures(rollouts)


def _describe_spent_budget(rollouts: Sequence[RolloutBatch]) -> str:
    """Return the message that a judge's spent budget left rows unscored; empty if none is."""
    spent = filter(None, (find_spent_budget(one, one.parts) for one in rollouts))
    if not (why := next(spent, "")):
        return ""
    num_rows = sum(one.rewards.numel() for one in rollouts)
    num_scored = sum(int(one.valid.sum()) for one in rollouts)
    return (
        f"{why} {num_scored} of {num_rows} completions have a new reward. Raise "
        "limits.max_cost_usd, or rescore fewer steps with --last; with judge.cache, verdicts that "
        "are paid for are not paid again."
    )


def _missing_rows(num_lost: int, rollouts: Sequence[RolloutBatch]) -> list[str]:
    lines = []
    if num_lost:
        lines.append(
            f"{num_lost} rows are left out: their prompts are no longer in the data, or their text "
            "has changed. Use the data settings of the run."
        )
    failures = [failure for one in rollouts if (failure := find_unreported(one))]
    if failures and not failed_in_all(rollouts):
        worst = max(failures, key=lambda failure: failure.fraction)
        lines.append(f"Some rows could not be scored; in the worst step, {worst}")
    return lines


def logged_steps(run_dir: Path, last: int | None) -> list[Path]:
    """Return the completions files of a run, of all ranks, in the order of the steps.

    Raises:
        UserError: there are none.
    """
    files = [*files_by_step(run_dir).values()]
    if not files:
        raise UserError(f"{run_dir} has no completions/*.parquet to score again.")
    return [*chain.from_iterable(files if last is None else files[-last:])]


def read_step(path: Path, prompts: Mapping[str, Prompt]) -> LoggedStep:
    """Read the groups of a file whose prompts are in the data, with the same id and text.

    Raises:
        UserError: the file is damaged, or lacks the tokens.
    """
    table = read_completions(path)
    if "token_ids" not in table.column_names:
        raise UserError(
            f"{path} must have a column token_ids (rewards may need it; older versions of lit-grpo "
            "wrote none). Use a newer run."
        )
    rows = table.to_pylist()
    kept: list[list[Row]] = []
    found: list[Prompt] = []
    for group in split_groups(rows):
        prompt = prompts.get(group[0]["prompt_id"])
        if prompt is not None and prompt.text == group[0]["prompt"]:
            kept.append(group)
            found.append(prompt)
    num_lost = len(rows) - sum(map(len, kept))
    return LoggedStep(step=rows[0]["step"], groups=kept, prompts=found, num_lost=num_lost)


def _score_again(module: GRPOModule, steps: Sequence[LoggedStep]) -> list[RolloutBatch]:
    suite = module.rewards
    suite.start(module.reasoning)
    suite.check(list({one.id: one for step in steps for one in step.prompts}.values()))
    console = Console(stderr=True)
    scored = []
    is_live = console.is_terminal
    for step in track(steps, "scoring", console=console, transient=True, disable=not is_live):
        groups = [list(map(_completion, group)) for group in step.groups]
        scored.append(suite.score(step.prompts, groups))
    return scored


def _completion(row: Row) -> Completion:
    """Return a completion from its row; the sampler's log-probabilities are not logged."""
    return Completion(
        token_ids=tuple(row["token_ids"]),
        sampler_logprobs=(),
        text=row["completion"],
        finish_reason=row["finish_reason"],
    )


def _with_old(table: pa.Table, before: Sequence[Row]) -> pa.Table:
    old = pa.array([row["reward"] for row in before], pa.float64())
    return table.append_column("reward_before", old)
