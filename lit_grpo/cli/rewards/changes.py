"""Compare two scorings of the same completions: what changed, in numbers and as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from rich.console import Console
from rich.table import Table

from lit_grpo.rewards.judged.alignment import rank_correlation
from lit_grpo.runs.tables import TextTail, add_numbers, make_table
from lit_grpo.types import Outcome
from lit_grpo.types.text import shorten

TOLERANCE = 1e-9
"""Values that differ by no more count as equal."""
NUM_SHOWN = 5

Row = dict[str, Any]
"""One row of a completions table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The rows before and after, in the same order; a group's rows are adjacent."""

    before: Sequence[Row]
    after: Sequence[Row]
    group_sizes: Sequence[int]
    """The number of rows of each group, in order."""

    @property
    def pairs(self) -> list[tuple[Row, Row]]:
        return list(zip(self.before, self.after, strict=True))

    @property
    def groups(self) -> list[tuple[list[float], list[float]]]:
        """Total rewards of each group before and after, for the rows that have both.

        Groups with fewer than two such rows are left out.
        """
        pairs = iter(self.pairs)
        groups = [_with_reward([*islice(pairs, size)]) for size in self.group_sizes]
        return [
            ([old["reward"] for old, _ in group], [new["reward"] for _, new in group])
            for group in groups
            if len(group) > 1
        ]


def _with_reward(pairs: Sequence[tuple[Row, Row]]) -> list[tuple[Row, Row]]:
    return [pair for pair in pairs if all(row["reward"] is not None for row in pair)]


def num_scored(comparison: Comparison) -> int:
    """Return how many rows could be scored again; the others have no reward since one failed."""
    return sum(map(_is_scored, comparison.after))


def num_changed(comparison: Comparison) -> int:
    """Return how many of the scored rows changed in the sum, or in a reward that both have."""
    return sum(
        any(not _is_same(old.get(key), new.get(key)) for key in _scored_keys(old, new))
        for old, new in comparison.pairs
        if _is_scored(new)
    )


def _is_scored(row: Row) -> bool:
    outcomes = (Outcome(value) for key, value in row.items() if key.startswith("outcome/"))
    return row["reward"] is not None or not any(one.is_failure for one in outcomes)


def _scored_keys(old: Row, new: Row) -> list[str]:
    scored = (key for key in old if key.startswith(("score/", "outcome/")))
    return ["reward", *(key for key in scored if key in new)]


def _is_same(old: Any, new: Any) -> bool:
    if isinstance(old, float) and isinstance(new, float):
        return abs(old - new) <= TOLERANCE
    return bool(old == new)


def correlations(comparison: Comparison) -> list[float]:
    """Return the rank correlation of old and new rewards, for each group where both vary."""
    return [
        rank_correlation(old, new)
        for old, new in comparison.groups
        if len(set(old)) > 1 and len(set(new)) > 1
    ]


def best_completion_changed(comparison: Comparison) -> list[bool]:
    """Return for each group whether its best completions before and after have none in common."""
    return [not _best(old) & _best(new) for old, new in comparison.groups]


def _best(values: Sequence[float]) -> set[int]:
    highest = max(values)
    return {index for index, value in enumerate(values) if value >= highest - TOLERANCE}


def changed_most(comparison: Comparison) -> list[tuple[Row, Row]]:
    """Return the rows whose reward changed most, among those that have one before and after."""
    changed = [
        (old, new)
        for old, new in _with_reward(comparison.pairs)
        if not _is_same(old["reward"], new["reward"])
    ]
    return sorted(changed, key=lambda pair: -abs(pair[1]["reward"] - pair[0]["reward"]))[:NUM_SHOWN]


def print_changes(console: Console, comparison: Comparison) -> None:
    """Print means before and after, changed outcomes, ranks, and the rows that changed most."""
    console.print(_means(comparison))
    for note in (*_left_out(comparison), _changed(comparison)):
        console.print(note, soft_wrap=True)
    if rows := changed_most(comparison):
        console.print(_rows(rows))


def _changed(comparison: Comparison) -> str:
    """Return how many completions changed, and how many could not be compared."""
    num_rows, scored = len(comparison.before), num_scored(comparison)
    if not scored:
        return f"Nothing to compare: none of the {num_rows} completions could be scored again."
    unscored = f" {num_rows - scored} could not be scored again." if scored < num_rows else ""
    if changed := num_changed(comparison):
        of = "" if scored == num_rows else " scored"
        return f"{changed} of {scored}{of} completions changed.{unscored} {_ranks(comparison)}"
    those = f"all {num_rows} completions" if not unscored else f"the {scored} scored completions"
    if not all(_is_in_both(comparison, f"score/{name}") for name in _reward_names(comparison)):
        return f"The weighted sum of {those} is the same as before.{unscored}"
    return f"Nothing changed: {those} have the same scores and outcomes as before.{unscored}"


def _ranks(comparison: Comparison) -> str:
    found, changed = correlations(comparison), best_completion_changed(comparison)
    if not changed:
        return "No group has two rows with a reward both before and after, so none can be compared."
    best = f"{sum(changed) / len(changed):.0%} of {len(changed)} groups have a new best completion"
    if not found:
        return f"{best}; in none do both scorings vary, so ranks cannot be compared."
    return (
        f"{best}; in the {len(found)} where both scorings vary, the rank correlation of old and "
        f"new rewards is {sum(found) / len(found):.3f} on average."
    )


def _means(comparison: Comparison) -> Table:
    table = make_table("reward")
    add_numbers(table, "mean before", "mean after", "outcome changed")
    for name in _reward_names(comparison):
        key = f"score/{name}"
        table.add_row(name, *_both_means(comparison, key), _outcome_changed(comparison, name))
    table.add_row("weighted sum", *_both_means(comparison, "reward"), "")
    return table


def _reward_names(comparison: Comparison) -> list[str]:
    keys = {**comparison.before[0], **comparison.after[0]}
    return [key.removeprefix("score/") for key in keys if key.startswith("score/")]


def _is_in_both(comparison: Comparison, key: str) -> bool:
    """Return whether rows have a column before and after: a reward may be new, or gone."""
    return all(key in rows[0] for rows in (comparison.before, comparison.after))


def _both_means(comparison: Comparison, key: str) -> tuple[str, str]:
    """Return the means over the rows with both values, or of the only side that has any."""
    pairs = _values(comparison, key)
    both = [pair for pair in pairs if None not in pair]
    before, after = zip(*(both or pairs), strict=True)
    return _mean(before), _mean(after)


def _values(comparison: Comparison, key: str) -> list[tuple[float | None, float | None]]:
    return [(old.get(key), new.get(key)) for old, new in comparison.pairs]


def _left_out(comparison: Comparison) -> Iterator[str]:
    """Yield which means leave out rows that have one value only."""
    keys = {name: f"score/{name}" for name in _reward_names(comparison)}
    for name, key in {**keys, "the weighted sum": "reward"}.items():
        pairs = _values(comparison, key)
        both = sum(None not in pair for pair in pairs)
        one = sum((old is None) != (new is None) for old, new in pairs)
        if both and one:
            yield (
                f"The means of {name} are over the {both} rows with a value before and after; "
                f"{one} have only one of them."
            )


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known) / len(known):.3f}" if known else "–"


def _outcome_changed(comparison: Comparison, name: str) -> str:
    """Return the share of rows whose outcome changed; a dash for a reward that is new or gone."""
    key = f"outcome/{name}"
    if not _is_in_both(comparison, key):
        return "–"
    changed = [old[key] != new[key] for old, new in comparison.pairs]
    return f"{sum(changed) / len(changed):.1%}"


def _rows(pairs: Sequence[tuple[Row, Row]]) -> Table:
    """Return a table with the numbers first, since the texts are cut in a narrow terminal."""
    table = Table(box=None, header_style="bold", pad_edge=False, title="changed most")
    table.title_justify = "left"
    add_numbers(table, "reward", "step")
    for name in ("prompt", "completion"):
        table.add_column(name)
    for old, new in pairs:
        change = f"{old['reward']:.3g} → {new['reward']:.3g}"
        texts = [TextTail(shorten(old[key])) for key in ("prompt_id", "completion")]
        table.add_row(change, str(old["step"]), *texts)
    return table
