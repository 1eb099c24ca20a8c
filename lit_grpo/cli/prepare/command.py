"""Run ``lit-grpo prepare``: show the recipes of training data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from lit_grpo.cli.file_options import parse_options
from lit_grpo.cli.prepare.recipe import Recipe, known_recipes, read_recipe
from lit_grpo.runs.tables import add_numbers, make_table, open_console
from lit_grpo.stopping import ExitCode


def prepare(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code.

    Raises:
        UserError: the arguments or a recipe are wrong.
    """
    parse_options("prepare", arguments)
    recipes = {name: read_recipe(str(path)) for name, path in known_recipes().items()}
    console = open_console()
    console.print(_table(recipes))
    for name, recipe in recipes.items():
        phases = f"; phases {recipe.curriculum}" if recipe.curriculum else ""
        console.print(f"{name}: {recipe.description}{phases}", soft_wrap=True)
    return ExitCode.DONE


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
