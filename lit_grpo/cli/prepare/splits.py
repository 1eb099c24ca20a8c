"""Decide which rows are held out, which are for validation and which for training.

Rows are ordered by the hashes of their ids so that every prefix has the shares of the sources'
weights. The first rows are held out, so a larger holdout contains a smaller one, whatever
the order of rows and files.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lit_grpo.cli.prepare.recipe import Recipe
from lit_grpo.cli.prepare.rows import PreparedRow
from lit_grpo.data.rows.prepared import Holdout
from lit_grpo.types import UserError

SPLITS = ("train", "validation", "holdout")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How many prompts each split has."""

    holdout: int
    validation: int | float
    """Number of rows, or fraction of those not held out."""


def in_order(
    rows: Sequence[PreparedRow], recipe: Recipe, held_out: Holdout | None = None
) -> list[PreparedRow]:
    """Return rows in the order in which they are split; those that are held out come first."""

    def is_held_out(row: PreparedRow) -> bool:
        return held_out is not None and held_out.has(row.id, *row.hashes)

    ranks: Counter[tuple[str, bool]] = Counter()
    keys: dict[str, tuple[bool, float, int]] = {}
    for row in sorted(rows, key=lambda one: _hash(recipe.seed, one.id)):
        is_first = is_held_out(row)
        rank = ranks[row.source, is_first]
        ranks[row.source, is_first] += 1
        keys[row.id] = (not is_first, *_place(recipe, row.source, rank))
    return sorted(rows, key=lambda row: keys[row.id])


def _place(recipe: Recipe, source: str, rank: int) -> tuple[float, int]:
    """Return a sort key of a source's row number ``rank`` among all sources' rows."""
    return (rank + 0.5) / recipe.sources[source].weight, list(recipe.sources).index(source)


def split(
    rows: Sequence[PreparedRow], sizes: Sizes, held_out: Holdout | None = None
) -> dict[str, list[PreparedRow]]:
    """Split rows that are in order; rows with the same prompt come into the same split.

    So do a row whose prompt is a question and one whose prompt wraps that question.

    Args:
        rows: As `in_order` returns them.
        sizes: Numbers of prompts; the holdout's counts without ``held_out``.
        held_out: What is held out instead of the first prompts.

    Raises:
        UserError: no row is left to train on, of all or of a source.
    """
    prompt_of = _prompts(rows)
    texts = list(dict.fromkeys(prompt_of.values()))
    if held_out is None:
        first = sizes.holdout
    else:
        kept_out = {prompt_of[row.id] for row in rows if held_out.has(row.id, *row.hashes)}
        texts.sort(key=lambda text: text not in kept_out)
        first = len(kept_out)
    first = min(first, len(texts))
    left = len(texts) - first
    fraction = sizes.validation
    wanted = round(left * fraction) if isinstance(fraction, float) else fraction
    num_validation = min(wanted, left)
    names = {
        text: "holdout"
        if rank < first
        else ("validation" if rank < first + num_validation else "train")
        for rank, text in enumerate(texts)
    }
    found: dict[str, list[PreparedRow]] = {name: [] for name in SPLITS}
    for row in rows:
        found[names[prompt_of[row.id]]].append(row)
    _check_train(found, first, num_validation, len(texts))
    return found


def _prompts(rows: Sequence[PreparedRow]) -> dict[str, str]:
    """Return the prompt's hash by id; the question's hash if that is a prompt by itself."""
    known = {row.text_hash for row in rows}
    return {row.id: next(one for one in reversed(row.hashes) if one in known) for row in rows}


def limit(rows: Sequence[PreparedRow], recipe: Recipe) -> list[PreparedRow]:
    """Return the first ``size`` rows, by the weights of their sources.

    Raises:
        UserError: a source has too few rows.
    """
    ordered = in_order(rows, recipe)
    if recipe.size is None:
        return ordered
    counts = Counter(row.source for row in rows)
    largest = _largest_size(counts, recipe)
    if recipe.size > largest:
        there = ", ".join(f"{counts[name]} of {name}" for name in recipe.sources)
        raise UserError(
            f"size must be at most {largest} for these weights, got {recipe.size} (to train on "
            f"there are {there}). Set --size {largest}, or change the weights."
        )
    return ordered[: recipe.size]


def _largest_size(counts: Mapping[str, int], recipe: Recipe) -> int:
    """Return how many rows come before the first one that a source would need but lacks."""
    first_missing = min(_place(recipe, name, number) for name, number in counts.items())
    return sum(
        _place(recipe, name, rank) < first_missing
        for name, number in counts.items()
        for rank in range(number)
    )


def _hash(seed: int, key: str) -> str:
    return hashlib.sha256(f"{seed}:{key}".encode()).hexdigest()


def _check_train(
    found: Mapping[str, Sequence[PreparedRow]], num_held_out: int, num_validation: int, num: int
) -> None:
    sources = {row.source for rows in found.values() for row in rows}
    empty = sorted(sources - {row.source for row in found["train"]})
    if empty:
        raise UserError(
            f"every source must have rows to train on, got none of {', '.join(empty)}: of {num} "
            f"prompts {num_held_out} are held out and {num_validation} validate. Set "
            "--holdout_size and --validation_size lower, or add rows."
        )
