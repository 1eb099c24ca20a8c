"""What moves between two scorings of the same completions, in numbers and words. Scores nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from lit_grpo.diagnostics import shorten
from lit_grpo.rewards.judged.alignment import rank_correlation

SAME = 1e-9
"""Values nearer to each other are the same."""
NUM_SHOWN = 5

Row = dict[str, Any]
"""One row of a completions table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The rows before and after, in the same order, G of each prompt in a row."""

    before: Sequence[Row]
    after: Sequence[Row]
    group_size: int

    @property
    def pairs(self) -> list[tuple[Row, Row]]:
        return list(zip(self.before, self.after, strict=True))

    @property
    def groups(self) -> list[tuple[list[float], list[float]]]:
        """Total rewards before and after of each group, of the rows that have one both times.

        Groups with fewer than two such rows are left out.
        """
        starts = range(0, len(self.pairs), self.group_size)
        groups = [_with_reward(self.pairs[start : start + self.group_size]) for start in starts]
        return [
            ([old["reward"] for old, _ in group], [new["reward"] for _, new in group])
            for group in groups
            if len(group) > 1
        ]


def _with_reward(pairs: Sequence[tuple[Row, Row]]) -> list[tuple[Row, Row]]:
    return [pair for pair in pairs if all(row["reward"] is not None for row in pair)]


def num_moved(comparison: Comparison) -> int:
    """Rows with another value or outcome than before, of any reward or of their sum."""
    return sum(
        any(not _is_same(old.get(key), new.get(key)) for key in _scored_keys(old, new))
        for old, new in comparison.pairs
    )


def _scored_keys(old: Row, new: Row) -> list[str]:
    return ["reward", *(key for key in {**old, **new} if key.startswith(("score/", "outcome/")))]


def _is_same(old: Any, new: Any) -> bool:
    if isinstance(old, float) and isinstance(new, float):
        return abs(old - new) <= SAME
    return old == new


def correlations(comparison: Comparison) -> list[float]:
    """Rank correlation of old and new rewards in each group that differs inside both times."""
    return [
        rank_correlation(old, new)
        for old, new in comparison.groups
        if len(set(old)) > 1 and len(set(new)) > 1
    ]


def best_changed(comparison: Comparison) -> list[bool]:
    """For each group, whether no completion is the best, or among the best, both times."""
    return [not _best(old) & _best(new) for old, new in comparison.groups]


def _best(values: Sequence[float]) -> set[int]:
    highest = max(values)
    return {place for place, value in enumerate(values) if value >= highest - SAME}


def moved_most(comparison: Comparison) -> list[tuple[Row, Row]]:
    """The rows whose total reward moved most, of those that have one both times."""
    moved = [
        (old, new)
        for old, new in _with_reward(comparison.pairs)
        if not _is_same(old["reward"], new["reward"])
    ]
    return sorted(moved, key=lambda pair: -abs(pair[1]["reward"] - pair[0]["reward"]))[:NUM_SHOWN]


# What is printed


def print_changes(console: Console, comparison: Comparison) -> None:
    """Means before and after, outcomes, ranks, and the rows that moved most."""
    num_rows, moved = len(comparison.before), num_moved(comparison)
    console.print(_means(comparison))
    if not moved:
        console.print(
            f"Nothing moved: all {num_rows} completions have the scores and outcomes that they had."
        )
        return
    console.print(f"{moved} of {num_rows} completions moved. {_ranks(comparison)}")
    if rows := moved_most(comparison):
        console.print(_rows(rows))


def _ranks(comparison: Comparison) -> str:
    found, changed = correlations(comparison), best_changed(comparison)
    if not changed:
        return "No group has two rewards to compare both times."
    best = (
        f"{sum(changed) / len(changed):.0%} of {len(changed)} groups have another best completion"
    )
    if not found:
        return f"{best}; no group differs inside both times, so ranks cannot be compared."
    return (
        f"{best}; in the {len(found)} that differ inside both times the rank correlation of old "
        f"and new rewards is {sum(found) / len(found):.3f} on average."
    )


def _means(comparison: Comparison) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("reward", no_wrap=True)
    for name in ("mean before", "mean after", "outcome changed"):
        table.add_column(name, justify="right")
    for name in _reward_names(comparison):
        key = f"score/{name}"
        table.add_row(name, *_both_means(comparison, key), _outcome_changed(comparison, name))
    table.add_row("weighted sum", *_both_means(comparison, "reward"), "")
    return table


def _reward_names(comparison: Comparison) -> list[str]:
    keys = {**comparison.before[0], **comparison.after[0]}
    return [key.removeprefix("score/") for key in keys if key.startswith("score/")]


def _both_means(comparison: Comparison, key: str) -> tuple[str, str]:
    before, after = (_mean([row.get(key) for row in rows]) for rows in _sides(comparison))
    return before, after


def _sides(comparison: Comparison) -> tuple[Sequence[Row], Sequence[Row]]:
    return comparison.before, comparison.after


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known) / len(known):.3f}" if known else "–"


def _outcome_changed(comparison: Comparison, name: str) -> str:
    """Of the rows; nothing for a reward that is new or gone."""
    key = f"outcome/{name}"
    if any(key not in rows[0] for rows in _sides(comparison)):
        return "–"
    changed = [old[key] != new[key] for old, new in comparison.pairs]
    return f"{sum(changed) / len(changed):.1%}"


def _rows(pairs: Sequence[tuple[Row, Row]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, title="moved most")
    table.title_justify = "left"
    table.add_column("step", justify="right")
    for name in ("prompt", "completion"):
        table.add_column(name, overflow="ellipsis", no_wrap=True)
    table.add_column("reward", no_wrap=True)
    for old, new in pairs:
        texts = [" ".join(shorten(old[key]).split()) for key in ("prompt_id", "completion")]
        table.add_row(str(old["step"]), *texts, f"{old['reward']:.3g} → {new['reward']:.3g}")
    return table
