"""Run ``lit-grpo prepare``: show the recipes of training data, or make data by one."""

from __future__ import annotations

import json
import shlex
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from lit_grpo.cli.file_options import parse_options, same_recipe
from lit_grpo.cli.prepare.gold_cache import StoredGold
from lit_grpo.cli.prepare.join_gold import NoCache
from lit_grpo.cli.prepare.pipeline import PrepareOptions, run
from lit_grpo.cli.prepare.recipe import Recipe, known_recipes, read_recipe
from lit_grpo.cli.prepare.tables import print_manifest, print_recipes
from lit_grpo.runs.files.writable import check_writable
from lit_grpo.runs.tables import open_console
from lit_grpo.stopping import ExitCode
from lit_grpo.types import UserError


def prepare(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code.

    Raises:
        UserError: the arguments, a recipe or its data are wrong; nothing was written.
    """
    given = parse_options("prepare", arguments)
    console = open_console()
    if given.list:
        recipes = {name: read_recipe(str(path)) for name, path in known_recipes().items()}
        print_recipes(recipes, console)
        return ExitCode.DONE
    if given.out is None:
        raise UserError("prepare needs a directory to write: set --out DIR, or --list the recipes.")
    check_writable("--out", given.out, Path(given.out).absolute().parent)
    manifest = run(_options(given), _track)
    if given.json:
        print(json.dumps(manifest, sort_keys=True, indent=1))
    else:
        print_manifest(manifest, console)
        command = "sft" if given.sft else "fit"
        config = shlex.quote(f"{given.out}/data.yaml")
        console.print(f"next: lit-grpo {command} --config YOURS.yaml --config {config}")
    return ExitCode.DONE


def _options(given: Namespace) -> PrepareOptions:
    recipe = _changed(read_recipe(given.preset, given.data), given)
    if given.holdout and given.holdout_size is not None:
        raise UserError(
            "holdout_size must be left out with --holdout, got "
            f"{given.holdout_size} (the file says what is held out). Set only one of them."
        )
    cache = _cache(recipe, given.cache)
    return PrepareOptions(
        name=given.preset,
        recipe=recipe,
        out=Path(given.out),
        holdout=Path(given.holdout) if given.holdout else None,
        release_holdout=given.release_holdout,
        cache=cache or NoCache(),
        scored_by=cache.scored_by if cache else {},
        scoring=same_recipe("precompute", given),
        only_cached=given.only_cached,
        bad_rows=given.bad_rows,
        sft=given.sft,
    )


def _cache(recipe: Recipe, directory: str | None) -> StoredGold | None:
    """Return the gold scores of a directory, by default the recipe's if it exists.

    Raises:
        UserError: the directory is not there, or has the scores of another judge.
    """
    path = Path(directory or recipe.gold.cache).expanduser()
    if path.is_dir():
        return StoredGold(path, recipe)
    if directory is None:
        return None
    raise UserError(
        f"cache must be a directory of gold scores, got {directory} (there is none). Set --cache "
        "to that of lit-grpo precompute."
    )


def _changed(recipe: Recipe, given: Namespace) -> Recipe:
    """Return the recipe with the settings that the command line has."""
    names = ("holdout_size", "validation_size", "seed", "size")
    changes = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    kinds = {"exact": given.duplicates, "near": given.near_duplicates}
    duplicates = replace(recipe.duplicates, **{name: one for name, one in kinds.items() if one})
    return replace(recipe, **changes, duplicates=duplicates)


def _track(items: Iterable[Any], number: int, what: str) -> Iterable[Any]:
    """Yield items, with a progress bar on a terminal's stderr."""
    console = Console(stderr=True)
    return track(
        items, what, number, console=console, transient=True, disable=not console.is_terminal
    )
