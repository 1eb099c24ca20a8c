"""Read a source of a recipe: its rows in the form of prepared data, and why others were dropped."""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lit_grpo.cli.prepare.recipe import RecipeSource, is_shipped
from lit_grpo.cli.prepare.rows import (
    PreparedRow,
    UnusableRow,
    prompt_columns,
    to_prepared,
    with_ids,
)
from lit_grpo.data.rows.filters import MISSING, absent_column, failed_filter, find_value
from lit_grpo.data.rows.gold import answer_fault, gold_answers
from lit_grpo.data.rows.sources import Row, read_rows
from lit_grpo.types import UserError

BadRows = Literal["refuse", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """The rows of one source."""

    rows: Sequence[PreparedRow]
    num_read: int
    dropped: Counter[str]
    """Number of rows by the reason why they were dropped."""
    files: Sequence[dict[str, Any]]
    """The name, a hash of the content, and the bytes or rows of each file or dataset."""


def collect(name: str, source: RecipeSource, bad_rows: BadRows, recipe: str) -> Collected:
    """Read a source and apply its filters.

    Args:
        name: Name of the source.
        source: Where its rows are.
        bad_rows: Whether rows that cannot be used are an error.
        recipe: The name of its recipe, for messages.

    Raises:
        UserError: a file cannot be read, a row cannot be used, or none is left.
    """
    dropped: Counter[str] = Counter()
    rows: list[PreparedRow] = []
    files = []
    num_read = 0
    for file in source.files:
        read = _read(file, name, recipe)
        num_read += len(read)
        files.append(_describe(file, read))
        if bad_rows == "refuse":
            _check_columns(read, name, source, recipe)
        rows += _usable(read, name, source, bad_rows, dropped)
    kept = []
    for row in rows:
        failed = failed_filter(row.columns, source.where)
        if failed is None:
            kept.append(row)
        else:
            dropped[f"filter {failed}"] += 1
    if not kept:
        reasons = ", ".join(f"{reason}: {number}" for reason, number in dropped.items())
        absent = absent_column(source.where, [row.columns for row in rows]) if rows else None
        raise UserError(
            f"source {name} has no row left of {num_read} ({reasons})"
            f"{f': {absent}' if absent else '.'} Change sources.{name}.where "
            "or its data."
        )
    named = with_ids(kept, {name: source})
    return Collected(rows=named, num_read=num_read, dropped=dropped, files=files)


def _read(file: str, name: str, recipe: str) -> list[Row]:
    if not Path(file).expanduser().exists():  # the Hub may be slow to answer, or to fail
        print(f"reading {file}, source {name!r} of {recipe}", file=sys.stderr, flush=True)
    try:
        return read_rows(file)
    except UserError as error:
        own = f" To read rows of yours, set --data {name}=FILE, or --preset to a recipe of yours."
        raise UserError(
            f"the source {name!r} of {recipe} cannot be read: {error}"
            f"{own if is_shipped(recipe) else ''}"
        ) from error


def _check_columns(rows: Sequence[Row], name: str, source: RecipeSource, recipe: str) -> None:
    """Raise UserError if no row of a file has a prompt, or a column to which a role is given.

    Other roles than these may be missing.
    """
    for role in ("id", "prompt", "answer"):
        column = source.columns.get(role)
        names = prompt_columns(source) if role == "prompt" else [column] if column else []
        if not names or any(_has(row, names) for row in rows):
            continue
        file, there = rows[0].source, ", ".join(rows[0].columns)
        what = (
            f"must have the column {column!r}, from which {recipe} takes the {role} of the source "
            f"{name}, got {there}"
            if column
            else f"has no column that is recognised as the {role}; it has {there}"
        )
        own = f"{{kind: {source.kind}, data: {file}, columns: {{{role}: NAME}}}}"
        fix = (
            "Set --preset to a file of your own with {description: mine, sources: "
            f"{{{name}: {own}}}}}; a column called {role} needs no mapping"
            if is_shipped(recipe)
            else f"Set sources.{name}.columns: {{{role}: NAME}}"
        )
        raise UserError(f"{file} {what}. {fix}.")


def _has(row: Row, names: Sequence[str]) -> bool:
    return any(find_value(row.columns, name) is not MISSING for name in names)


def _usable(
    rows: Sequence[Row], name: str, source: RecipeSource, bad_rows: BadRows, dropped: Counter[str]
) -> list[PreparedRow]:
    """Return the rows of a file that can be used, and count the others."""
    mapping = {"answer": source.columns["answer"]} if "answer" in source.columns else {}
    faults = [answer_fault(row, mapping) for row in rows]
    readable = [row for row, fault in zip(rows, faults, strict=True) if fault is None]
    known = iter(gold_answers(readable, mapping, required=False) if readable else ())
    answers = [next(known) if fault is None else None for fault in faults]
    has_answers = source.kind == "verifiable" and any(one is not None for one in answers)
    found = []
    for row, answer, fault in zip(rows, answers, faults, strict=True):
        try:
            if fault is not None:
                raise UnusableRow("unusable gold answer", fault)
            if has_answers and answer is None:
                raise UnusableRow("no gold answer")
            found.append(to_prepared(row, answer, name, source))
        except UnusableRow as error:
            if bad_rows == "refuse":
                raise UserError(
                    f"{row.origin} of source {name} cannot be used: {error.detail}. Repair the "
                    f"row, set sources.{name}.columns, or drop such rows with --bad_rows drop."
                ) from error
            dropped[error.reason] += 1
    return found


def _describe(source: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Return what tells whether a file or dataset is the same another time."""
    path = Path(source).expanduser()
    if path.is_file():
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        size = {"bytes": path.stat().st_size}
    else:
        digest = hashlib.sha256()
        for row in rows:
            digest.update(json.dumps(row.columns, sort_keys=True, default=str).encode())
        size = {"rows": len(rows)}
    name = path.name if path.exists() else source
    return {"name": name, "sha256": digest.hexdigest(), **size}
