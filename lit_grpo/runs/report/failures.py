"""Count which rewards failed on rows of a run, and why, for its end and its report."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
from pyarrow.dataset import dataset

from lit_grpo.runs.report.history import Run
from lit_grpo.runs.tables import one_line
from lit_grpo.types import Outcome

SHOWN_FRACTION = 0.01
"""A reward that failed on no more than this share of its rows is not mentioned."""
SHOWN_CHARACTERS = 200

FAILURES = [
    outcome
    for outcome in Outcome
    if outcome not in (Outcome.OK, Outcome.ABSTAIN, Outcome.NOT_SAMPLED, Outcome.OTHER_SOURCE)
]
"""Outcomes that a reward itself causes; the engine's failures are in other metrics."""


def describe_failures(run: Run) -> list[str]:
    """Return a line for each reward that failed on more than a few rows of the whole run.

    And for each that returned None on all of them.
    """
    pattern = re.compile(rf"reward/(.+)/({'|'.join(FAILURES)})_fraction")
    found = [match for column in run.metrics if (match := pattern.fullmatch(str(column)))]
    fractions: defaultdict[str, float] = defaultdict(float)
    for match in found:
        fractions[match[1]] += run.metrics[match[0]].mean()
    return [
        *(
            _describe(name, fraction, run.path / "completions")
            for name, fraction in fractions.items()
            if fraction > SHOWN_FRACTION
        ),
        *map(_describe_none, _always_none(run)),
    ]


def _always_none(run: Run) -> Iterator[str]:
    """Yield the rewards that have returned None for every row of the run that was sampled."""
    for column in run.metrics:
        match = re.fullmatch(r"reward/(.+)/abstain_fraction", str(column))
        if match and run.metrics[column].max() > 0:
            others = {f"reward/{match[1]}/{one}_fraction" for one in (Outcome.OK, *FAILURES)}
            if not run.metrics[sorted(others & {*run.metrics})].to_numpy().max(initial=0) > 0:
                yield match[1]


def _describe_none(name: str) -> str:
    return (
        f"Reward {name!r} returned None for every completion, so it did not count: check whether a "
        f"return is missing, unless that is intended (detail/{name} of completions/ may say why)."
    )


def _describe(name: str, fraction: float, completions: Path) -> str:
    """Count the outcomes of a reward in the completions of all ranks, and show the commonest."""
    scores = list(_scores(name, completions))
    reasons = [
        (outcome, one_line(detail or "")) for outcome, detail in scores if outcome in FAILURES
    ]
    if not reasons:
        return (
            f"Reward {name!r} failed on {fraction:.1%} of its rows, which are not in {completions}."
        )
    outcome, num_rows = Counter(outcome for outcome, _ in reasons).most_common(1)[0]
    details = Counter(text for kind, text in reasons if kind == outcome)
    ((detail, num_same),) = details.most_common(1)
    with_it = "" if num_same == num_rows else f", {num_same:,} of them as here"
    shown = detail if len(detail) <= SHOWN_CHARACTERS else f"{detail[:SHOWN_CHARACTERS]}…"
    return (
        f"Reward {name!r} failed on {len(reasons):,} of {len(scores):,} rows "
        f"({len(reasons) / len(scores):.1%}), most often ({num_rows:,}{with_it}) with {outcome}: "
        f"{shown.rstrip('.') or 'no detail'}. Read more: the columns outcome/{name} and "
        f"detail/{name} of {completions}."
    )


def _scores(name: str, completions: Path) -> Iterator[tuple[str | None, str | None]]:
    """Yield outcome and detail of the scores that a reward was asked for.

    A damaged file is left out, and one from before the run had the reward.
    """
    schema = pa.schema([(f"outcome/{name}", pa.string()), (f"detail/{name}", pa.string())])
    for path in sorted(completions.glob("step_*.parquet")):
        with suppress(OSError, pa.ArrowException):
            columns = dataset(path, schema).to_table().columns
            scores = zip(*(one.to_pylist() for one in columns), strict=True)
            yield from (one for one in scores if one[0] not in (None, Outcome.OTHER_SOURCE))
