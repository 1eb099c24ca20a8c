"""Where the rows of a data module come from: files, datasets, and rows given in Python."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lit_grpo.data.sources import Row
from lit_grpo.types import setting_error


@dataclass(frozen=True, slots=True)
class GivenRows:
    """Rows that a program gives as dicts."""

    key: str
    """The argument that they are given for: ``train``."""
    columns: tuple[Mapping[str, Any], ...]

    def __str__(self) -> str:
        return f"{len(self.columns)} rows given in Python"

    def rows(self) -> list[Row]:
        return [
            Row(source=f"data.{self.key}", number=number, id=f"{self.key}:{number}", columns=row)
            for number, row in enumerate(self.columns, start=1)
        ]


Source = str | GivenRows
"""A file or dataset as written in a config, or the rows themselves."""


def as_sources(key: str, given: Any) -> list[Source]:
    """Return the sources that an argument of a data module names; dicts are the rows of one source.

    Raises:
        UserError: it is no path, no rows, and no list of one kind of them.
    """
    if given is None:
        return []
    if isinstance(given, str | os.PathLike):
        return [os.fspath(given)]
    is_list = isinstance(given, Iterable) and not isinstance(given, Mapping)
    items: list[Any] = [*given] if is_list else [given]
    if is_list and items and all(isinstance(one, Mapping) for one in items):
        return [GivenRows(key, tuple(items))]
    if not all(isinstance(one, str | os.PathLike) for one in items):
        rule = "a .jsonl, .parquet or .csv file, a dataset, a list of these, or a list of dicts"
        raise setting_error(f"data.{key}", rule, f"{given!r:.80}", "a dict is a row")
    return [os.fspath(one) for one in items]
