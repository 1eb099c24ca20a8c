"""Print tables of recipes, and of prepared data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from lit_grpo.cli.prepare.pipeline import BEYOND_SIZE
from lit_grpo.cli.prepare.recipe import Recipe
from lit_grpo.runs.tables import add_numbers, make_table


def print_recipes(recipes: Mapping[str, Recipe], console: Console) -> None:
    """Print what each recipe is made of."""
    console.print(_table(recipes))
    for name, recipe in recipes.items():
        phases = f"; phases {recipe.curriculum}" if recipe.curriculum else ""
        console.print(f"{name}: {recipe.description}{phases}", soft_wrap=True)


def print_manifest(manifest: Mapping[str, Any], console: Console) -> None:
    """Print how many rows each source has in each split, and why others were dropped."""
    splits = manifest["splits"]
    table = make_table("source")
    add_numbers(table, "read", "kept", *splits)
    table.add_column("dropped", overflow="fold")
    for name, source in manifest["sources"].items():
        table.add_row(
            name,
            *(f"{source[key]:,}" for key in ("read", "kept")),
            *(f"{one['by_source'].get(name, 0):,}" for one in splits.values()),
            ", ".join(f"{why}: {number:,}" for why, number in source["dropped"].items()),
        )
    console.print(table)
    for line in copies_in_words(manifest["duplicates"]):
        console.print(line, soft_wrap=True)
    for line in (*_without_pairs(manifest), *_mostly_held_out(manifest)):
        console.print(line, soft_wrap=True)


def copies_in_words(copies: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """Yield how many copies of prompts were found, by kind and by the splits of both rows."""
    for kind, counts in copies.items():
        for where, number in counts.items():
            what = f"{kind} duplicate{'s' * (number != 1)}"
            place = f"between {where}" if " and " in where else f"within {where}"
            yield f"{number:,} {what}, {'of dropped rows' if where == 'dropped' else place}"


def _without_pairs(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yield which sources have no completion, if pairs were made."""
    there = manifest["splits"]["train"]["by_source"]
    for name, source in manifest["sources"].items() if manifest["sft"] else ():
        if name not in there and BEYOND_SIZE not in source["dropped"]:
            yield (
                f"{name} gives no pairs, since its rows have no completion (columns.completion "
                "of a source names the column that has them)"
            )


def _mostly_held_out(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yield which sources keep less than half of their rows for training."""
    splits = manifest["splits"]
    for name in manifest["sources"]:
        rows = {split: one["by_source"].get(name, 0) for split, one in splits.items()}
        if 2 * rows["train"] < sum(rows.values()) and rows["train"]:
            yield (
                f"{name} keeps {rows['train']:,} of {sum(rows.values()):,} rows to train on: the "
                "holdout and the validation data take rows of each source by its weight, not by "
                "its size. Lower holdout_size and validation_size, or the weight of the source."
            )


def _table(recipes: Mapping[str, Recipe]) -> Table:
    """Return a row for each source of each recipe."""
    table = make_table("recipe")
    for name in ("source", "kind"):
        table.add_column(name)
    add_numbers(table, "share")
    for name in ("data", "rows"):
        table.add_column(name, overflow="fold")
    for recipe_name, recipe in recipes.items():
        for name, source in recipe.sources.items():
            is_first = name == next(iter(recipe.sources))
            table.add_row(
                recipe_name if is_first else "",
                *(name, source.kind, f"{recipe.share(name):.0%}"),
                ", ".join(source.files),
                "; ".join(_describe(*one) for one in source.where.items()) or "all",
            )
    return table


def _describe(column: str, allowed: Any) -> str:
    """Return a filter in words."""
    match allowed:
        case [None, high]:
            return f"{column} at most {high}"
        case [low, None]:
            return f"{column} at least {low}"
        case [int() | float() as low, int() | float() as high]:
            return f"{column} from {low} to {high}"
        case [*values]:
            return f"{column} one of {', '.join(map(str, values))}"
        case value:
            return f"{column} {value}"
