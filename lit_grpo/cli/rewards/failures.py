"""Report which rewards failed on completions that a command scored; choose its exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from operator import attrgetter

from lit_grpo.cli.errors import print_error
from lit_grpo.diagnostics.absent_scores import Failure, find_failure
from lit_grpo.stopping import ExitCode
from lit_grpo.training.collecting.score_status import find_bug
from lit_grpo.types import RolloutBatch

REWARD_FAILED = 1
"""Exit code of ``rewards`` and ``rescore`` if a reward failed on every completion, and of
``rewards`` if rewards failed on more than a run allows."""


def report_bugs(rollouts: Sequence[RolloutBatch]) -> None:
    """Print a bug of each reward that has one, and on how many rows."""
    for name in rollouts[0].parts:
        if bug := next(filter(None, (find_bug(one, name) for one in rollouts)), ""):
            scores = [
                one for each in rollouts for group in each.groups for one in group.scores[name]
            ]
            share = sum(bool(one.bug) for one in scores) / sum(one.is_for_source for one in scores)
            print(f"reward {name!r} has a bug on {share:.0%} of the rows. {bug}", file=sys.stderr)


def report_failures(rollouts: Sequence[RolloutBatch]) -> int:
    """Print the bugs of rewards and which failed on every completion, and return the exit code."""
    report_bugs(rollouts)
    failures = failed_in_all(rollouts)
    if not failures:
        return ExitCode.DONE
    reasons = " ".join(
        f"{one.reward!r}, see above." if one.is_bug else str(one) for one in failures
    )
    return print_error(f"a reward failed on every completion: {reasons}", REWARD_FAILED)


def failed_in_all(rollouts: Sequence[RolloutBatch]) -> list[Failure]:
    """Return the failures of rewards that scored no completion of any batch."""
    first, *others = ({one.reward: one for one in failed_everywhere(each)} for each in rollouts)
    return [one for name, one in first.items() if all(name in other for other in others)]


def failed_everywhere(rollouts: RolloutBatch) -> list[Failure]:
    """Return the failures of rewards that scored no completion; abstaining is not a failure."""
    failures = [find_failure(rollouts, [name], attrgetter("is_failure")) for name in rollouts.parts]
    gave_none = [part.isnan().all() for part in rollouts.parts.values()]
    return [
        failure for failure, is_none in zip(failures, gave_none, strict=True) if is_none and failure
    ]


def find_unreported(rollouts: RolloutBatch) -> Failure | None:
    """Return why most rows lack a value, except bugs, which `report_failures` prints."""
    return find_failure(rollouts, counts_as_failure=lambda one: not one.bug)
