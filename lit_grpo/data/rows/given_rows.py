"""Where the rows of a data module come from: files, datasets, and rows given in Python."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from lit_grpo.data.rows.sources import Row
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
        """Return copies, so that nothing which a run does changes the rows of the program."""
        key = self.key
        return [
            Row(source=f"data.{key}", number=number, id=f"{key}:{number}", columns=deepcopy(row))
            for number, row in enumerate(self.columns, start=1)
        ]


_UNNAMED_INDEX = re.compile(r"__index_level_\d+__")
"""The name that pyarrow gives to the numbers of a DataFrame's rows, once some are left out."""
_WHY_NOT = "a dict is one row; of a DatasetDict give a split, as data['train']"
Source = str | GivenRows
"""A file or dataset as written in a config, or the rows themselves."""


def as_sources(key: str, given: Any) -> list[Source]:
    """Return the sources that an argument of a data module names; dicts are the rows of one source.

    So are the rows of a table that Arrow can read, such as a DataFrame of pandas.

    Raises:
        UserError: it is neither a path, nor rows, nor a list of one kind of them.
    """
    if given is None:
        return []
    if hasattr(given, "__arrow_c_stream__") and not isinstance(given, type):
        given = _rows_of_table(key, given)
    if isinstance(given, str | os.PathLike):
        return [os.fspath(given)]
    is_list = isinstance(given, Iterable) and not isinstance(given, Mapping)
    items: list[Any] = [*given] if is_list else [given]
    if is_list and items and all(isinstance(one, Mapping) for one in items):
        return [GivenRows(key, tuple(items))]
    if not all(isinstance(one, str | os.PathLike) for one in items):
        rule = "a .jsonl, .parquet or .csv file, a dataset, a list of these, or rows"
        raise setting_error(f"data.{key}", rule, f"{given!r:.80}", _WHY_NOT)
    return [os.fspath(one) for one in items]


def _rows_of_table(key: str, table: Any) -> list[dict[str, Any]]:
    """Return the rows of a table as a parquet file of it would have them: a NaN is None."""
    import pyarrow  # only here, as in `sources`

    try:
        rows = pyarrow.table(table)
        unnamed = [one for one in rows.column_names if _UNNAMED_INDEX.fullmatch(one)]
        return list(rows.drop_columns(unnamed).to_pylist())
    except (pyarrow.ArrowException, TypeError, ValueError) as error:
        raise setting_error(
            f"data.{key}",
            "a table with columns of one type each, or a list of dicts",
            type(table).__name__,
            ": ".join(map(str, reversed(error.args))),
        ) from error
