"""Prepare data by a recipe: read, find duplicates, split, join gold scores, write."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_grpo.cli.prepare.collect import BadRows, Collected, collect
from lit_grpo.cli.prepare.duplicates import contradictions, exact_copies, near_copies
from lit_grpo.cli.prepare.join_gold import GoldCache, NoCache, join_gold, refuse_unscored
from lit_grpo.cli.prepare.recipe import Recipe
from lit_grpo.cli.prepare.rows import PreparedRow, check_ids
from lit_grpo.cli.prepare.splits import SPLITS, Sizes, in_order, limit, split
from lit_grpo.cli.prepare.write import (
    hash_of_recipe,
    training_config,
    warmup_config,
    write_prepared,
)
from lit_grpo.data.rows.prepared import HOLDOUT_IDS, Holdout, read_held_out
from lit_grpo.types import UserError
from lit_grpo.types.settings import list_some

NOT_SCORED = "gold not cached"
NO_COMPLETION = "no completion"
BEYOND_SIZE = "beyond size"
_IDS_SHOWN = 3

Track = Callable[[Iterable[Any], int, str], Iterable[Any]]
"""Yields what it is given, and shows how far it is: the items, their number, what is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareOptions:
    """The data to prepare, and the directory to write.

    Args:
        name: Name of the recipe, or the path of its file.
        recipe: What the data are made of.
        out: The directory to write.
        holdout: A ``holdout_ids.json`` that is held out again, instead of rows of this data.
        release_holdout: Whether rows that ``out`` holds out so far may be trained on.
        cache: Gold scores.
        scored_by: Who gave them.
        scoring: The command that adds gold scores to the cache.
        only_cached: Keep only rows that have gold scores, of every source.
        bad_rows: Whether rows that cannot be used are an error.
        sft: Write pairs of prompt and completion: rows without a completion are left out, and
            gold scores are not needed.
    """

    name: str
    recipe: Recipe
    out: Path
    holdout: Path | None = None
    release_holdout: bool = False
    cache: GoldCache = field(default_factory=NoCache)
    scored_by: Mapping[str, Any] = field(default_factory=dict)
    scoring: str = "lit-grpo precompute"
    only_cached: bool = False
    bad_rows: BadRows = "refuse"
    sft: bool = False


def run(options: PrepareOptions, track: Track) -> dict[str, Any]:
    """Prepare data; return the manifest.

    Raises:
        UserError: the data are not what the recipe says; nothing is written then.
    """
    recipe = options.recipe
    collected = {
        name: collect(name, source, options.bad_rows, options.name)
        for name, source in track(recipe.sources.items(), len(recipe.sources), "reading")
    }
    rows = [row for one in collected.values() for row in one.rows]
    check_ids(rows, recipe.sources)
    held_out = Holdout.read(options.holdout) if options.holdout else None
    ordered = in_order(rows, recipe, held_out)
    copies = _find_copies(ordered, recipe, track)
    kept, dropped = _without_copies(ordered, copies, recipe)
    sizes = Sizes(holdout=recipe.holdout_size, validation=recipe.validation_size)
    splits = split(in_order(kept, recipe, held_out), sizes, held_out)
    if not options.release_holdout:
        _keep_held_out(splits, options.out)
    counts = _count_copies(copies, splits)
    listed = _held_out(splits["holdout"], options)
    splits = _usable(splits, options, dropped)
    about = {
        "recipe": {"name": Path(options.name).name, "sha256": hash_of_recipe(recipe)},
        "seed": recipe.seed,
        "sft": options.sft,
        "sources": _describe(collected, recipe, splits, dropped),
        "duplicates": counts,
        "gold": _about_gold(options),
        "curriculum": recipe.curriculum,
    }
    config = (
        warmup_config(options.out) if options.sft else training_config(options.out, recipe, splits)
    )
    return write_prepared(options.out, splits, listed, about, config)


def _find_copies(
    ordered: Sequence[PreparedRow], recipe: Recipe, track: Track
) -> dict[str, dict[str, str]]:
    """Return by exact and near the rows that are copies, each with the row that it is one of.

    Raises:
        UserError: there are some, and the recipe refuses them.
    """
    settings = recipe.duplicates
    found = {"exact": exact_copies(ordered), "near": dict[str, str]()}
    if settings.near != "ignore":
        rows = track(ordered, len(ordered), "near-duplicates")
        found["near"] = near_copies(rows, settings.threshold)
    for name, action in (("exact", settings.exact), ("near", settings.near)):
        if action == "refuse" and found[name]:
            copy, first = next(iter(found[name].items()))
            flag = "--duplicates" if name == "exact" else "--near_duplicates"
            raise UserError(
                f"rows must have different prompts, got {len(found[name])} {name} duplicates, the "
                f"first {copy} of {first}. Drop them with {flag} drop, or repair the data."
            )
    _report_contradictions(contradictions(ordered, found["exact"]), settings.exact)
    return found


def _report_contradictions(pairs: Sequence[tuple[PreparedRow, PreparedRow]], action: str) -> None:
    """Warn that rows with the same prompt have different gold answers."""
    if pairs:
        copy, first = pairs[0]
        kept = "the first is kept" if action == "drop" else "both are kept"
        print(
            f"{len(pairs)} exact duplicate{'s' * (len(pairs) > 1)} with another gold answer, such "
            f"as {first.columns['answer']!r:.60} in {first.origin} and "
            f"{copy.columns['answer']!r:.60} in {copy.origin}: they contradict each other, and "
            f"{kept}. Repair or remove one of them.",
            file=sys.stderr,
        )


def _without_copies(
    ordered: Sequence[PreparedRow], copies: Mapping[str, Mapping[str, str]], recipe: Recipe
) -> tuple[list[PreparedRow], dict[str, Counter[str]]]:
    """Return the rows without the copies that the recipe drops, and their number by source."""
    actions = {"exact": recipe.duplicates.exact, "near": recipe.duplicates.near}
    dropped: dict[str, Counter[str]] = {name: Counter() for name in recipe.sources}
    kept = []
    for row in ordered:
        reasons = [
            f"{name} duplicate"
            for name, action in actions.items()
            if action == "drop" and row.id in copies[name]
        ]
        if reasons:
            dropped[row.source][reasons[0]] += 1
        else:
            kept.append(row)
    return kept, dropped


def _count_copies(
    copies: Mapping[str, Mapping[str, str]], splits: Mapping[str, Sequence[PreparedRow]]
) -> dict[str, dict[str, int]]:
    """Return the numbers of copies by the splits of both rows; a dropped row takes the other's.

    A near-duplicate of a row that was itself dropped counts under ``dropped``.
    """
    split_of = {row.id: name for name, rows in splits.items() for row in rows}
    found: dict[str, dict[str, int]] = {}
    for kind, pairs in copies.items():
        counts: Counter[str] = Counter()
        for copy, first in pairs.items():
            there = {split_of[one] for one in (copy, first) if one in split_of}
            counts[" and ".join(name for name in SPLITS if name in there) or "dropped"] += 1
        found[kind] = dict(sorted(counts.items()))
    return found


def _keep_held_out(splits: Mapping[str, Sequence[PreparedRow]], out: Path) -> None:
    """Check that what a directory holds out so far stays held out.

    Raises:
        UserError: a row would be trained on, or would validate.
    """
    path = out / HOLDOUT_IDS
    try:
        earlier = Holdout.read(path) if path.is_file() else None
    except UserError as error:
        raise UserError(
            f"{out} holds out rows, but which is not known: {error} Choose another --out, or give "
            "the holdout up with --release_holdout."
        ) from error
    others = [row for name in SPLITS if name != "holdout" for row in splits[name]]
    freed = [row.id for row in others if earlier and earlier.has(row.id, *row.hashes)]
    if freed:
        raise UserError(
            f"{out} holds out rows that would be trained on or validate, got {len(freed)}: "
            f"{list_some(freed, _IDS_SHOWN)} (evaluations on the holdout could no longer be "
            f"compared). Keep them with --holdout {path} instead of --holdout_size, choose another "
            "--out, or give the holdout up with --release_holdout."
        )


def _held_out(rows: Sequence[PreparedRow], options: PrepareOptions) -> dict[str, dict[str, str]]:
    """Return what is held out by source: these rows, and all that a given file lists."""
    listed = read_held_out(options.holdout) if options.holdout else {}
    found = {name: dict(one) for name, one in listed.items()}
    for row in rows:
        found.setdefault(row.source, {})[row.id] = row.text_hash
    return found


def _usable(
    splits: Mapping[str, Sequence[PreparedRow]],
    options: PrepareOptions,
    dropped: dict[str, Counter[str]],
) -> dict[str, list[PreparedRow]]:
    """Return the splits with gold scores, without the rows that cannot be trained on.

    Which rows are held out was decided before, so it does not depend on the cache.

    Raises:
        UserError: rows have no gold scores, or none is left to train on.
    """
    found: dict[str, list[PreparedRow]] = {name: [] for name in splits}
    unscored: list[PreparedRow] = []
    for name, rows in splits.items():
        for row in rows:
            scored = join_gold(row, options.cache, options.recipe)
            needs_gold = options.only_cached or options.recipe.sources[row.source].needs_gold
            if options.sft and name != "holdout" and row.columns.get("completion") is None:
                dropped[row.source][NO_COMPLETION] += 1
            elif scored is None and needs_gold and not options.sft:
                unscored.append(row)
                dropped[row.source][NOT_SCORED] += 1
            else:
                found[name].append(scored or row)
    if not options.only_cached:
        can_ask = options.recipe.judge or all(row.kind == "verifiable" for row in unscored)
        command = options.scoring if can_ask else None
        left = {row.source for row in found["train"]}
        refuse_unscored(unscored, sum(map(len, splits.values())), command, left)
    _check_train(found["train"], options, dropped)
    train = limit(found["train"], options.recipe)
    beyond = Counter(row.source for row in found["train"])
    beyond.subtract(row.source for row in train)
    for source, number in (+beyond).items():
        dropped[source][BEYOND_SIZE] = number
    return found | {"train": train}


def _check_train(
    train: Sequence[PreparedRow], options: PrepareOptions, dropped: Mapping[str, Counter[str]]
) -> None:
    """Raise UserError if nothing of a source is left; pairs may come from one source only."""
    empty = sorted(options.recipe.sources.keys() - {row.source for row in train})
    if options.sft and not train:
        raise UserError(
            f"some source must have completions to make pairs of, got none in {', '.join(empty)}. "
            "Set sources.NAME.columns.completion to the column that has the worked answers."
        )
    if empty and not options.sft:
        reasons = ", ".join(f"{reason}: {num}" for reason, num in dropped[empty[0]].items())
        other = ", or take it out of the recipe's sources" if train else ""
        raise UserError(
            f"source {empty[0]} has no row left to train on ({reasons}). Set its "
            f"columns.gold_scores, or run {options.scoring}; or repair its rows if that has found "
            f"no gold for them{other}."
        )


def _about_gold(options: PrepareOptions) -> dict[str, Any]:
    """Return how gold scores are computed, and who gave the cached ones."""
    gold = options.recipe.gold
    return {"num_evals": gold.num_evals, "highest": gold.highest, **options.scored_by}


def _describe(
    collected: Mapping[str, Collected],
    recipe: Recipe,
    splits: Mapping[str, Sequence[PreparedRow]],
    dropped: Mapping[str, Counter[str]],
) -> dict[str, Any]:
    """Return of each source what it is, and how many rows were read, kept and dropped."""
    kept = Counter(row.source for rows in splits.values() for row in rows)
    return {
        name: {
            "kind": recipe.sources[name].kind,
            "weight": recipe.sources[name].weight,
            "files": one.files,
            "read": one.num_read,
            "kept": kept[name],
            "dropped": dict(one.dropped + dropped[name]),
        }
        for name, one in collected.items()
    }
