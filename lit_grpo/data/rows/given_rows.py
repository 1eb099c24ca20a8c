"""Rows given in Python: dicts, tables, datasets, and lists of files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lit_grpo.data.rows.sources import Row
from lit_grpo.types import UserError, setting_error
from lit_grpo.types.settings import shown
from lit_grpo.types.text import encodable


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
        source = f"data.{self.key}"
        return [
            _row(source, self.key, number, row) for number, row in enumerate(self.columns, start=1)
        ]


_UNNAMED_INDEX = re.compile(r"__index_level_\d+__")
"""The name that pyarrow gives to the numbers of a DataFrame's rows, once some are left out."""
_RULE = "a .jsonl, .parquet or .csv file, a dataset, a list of these, or rows"
_WHY_NOT = "a dict is one row; of a DatasetDict give a split, as data['train']"
if TYPE_CHECKING:
    Given = str | os.PathLike[str] | Iterable[Any] | None
else:
    Given = str | list[str] | None  # what a config can have
"""What a data module takes: files, datasets, or in Python the rows themselves or a table."""
Source = str | GivenRows
"""A file or dataset as written in a config, or the rows themselves."""


def as_sources(key: str, given: Any) -> list[Source]:
    """Return the sources that an argument of a data module names; dicts are the rows of one source.

    So are the rows of a table, such as a DataFrame of pandas, and those of several tables.

    Raises:
        UserError: it is neither a path, nor rows, nor a list of one kind of them.
    """
    if given is None:
        return []
    if isinstance(given, str | os.PathLike):
        return [os.fspath(given)]
    where = f"data.{key}"
    _refuse_other_sources(where, given)
    if _is_table(given):
        given = _rows_of_table(where, given)
    if not isinstance(given, Iterable) or isinstance(given, Mapping | bytes):
        raise setting_error(where, _RULE, f"{given!r:.80}", _WHY_NOT)
    items: list[Any] = [*given]
    kind = _kind_of_all(where, items)
    if kind == "tables":
        items = [row for table in items for row in _rows_of_table(where, table)]
    if kind == "files or datasets":
        return [os.fspath(one) for one in items]
    for number, row in enumerate(items, start=1):
        _check_columns(row, f"{where}, row {number}")
    if not items and key != "train":  # of which there is a message of its own
        raise setting_error(where, "rows, or null", "an empty list", "did a filter drop them all?")
    return [GivenRows(key, tuple(items))] if items else []


def _refuse_other_sources(where: str, given: object) -> None:
    """Refuse a function that would return rows, and a loader, which has batches."""
    if callable(given) and not isinstance(given, type):
        raise setting_error(where, _RULE, f"{given!r:.80}", "to take what it returns, call it")
    if hasattr(given, "collate_fn"):
        why = "the run makes the batches: give its dataset, as loader.dataset"
        raise setting_error(where, _RULE, f"a {type(given).__name__}", why)


def as_rows(owner: str, split: str, given: Any) -> Sequence[Row]:
    """Return what ``rows`` of a data module has returned for a split, with dicts as rows.

    None means that there is no such split; only ``train`` must have rows.

    Args:
        owner: Name of the class of the data module, which is the source of these rows.

    Raises:
        UserError: it is neither a table nor a list of dicts and rows.
    """
    if given is None and split != "train":
        return []
    what = f"{owner}.rows({split!r})"
    if _is_table(given):
        given = _rows_of_table(what, given)
    rule = f"{what} must return a list of rows, each a dict with its columns or a Row"
    if not isinstance(given, Iterable) or isinstance(given, str | Mapping):
        raise UserError(f"{rule}, got {shown(given)}.")
    rows = []
    for number, one in enumerate(given, start=1):
        if not isinstance(one, Row | Mapping):
            raise UserError(f"{rule}, got a list whose item {number} is {shown(one)}.")
        if isinstance(one, Mapping):
            _check_columns(one, f"row {number} of {what}")
            one = _row(owner, split, number, one)
        rows.append(one)
    return rows


def _row(source: str, split: str, number: int, columns: Mapping[str, Any]) -> Row:
    return Row(source=source, number=number, id=f"{split}:{number}", columns=deepcopy(columns))


def _check_columns(row: Mapping[Any, Any], where: str) -> None:
    """Check that the columns of a row have texts as names, and texts that UTF-8 has."""
    for name, value in row.items():
        if isinstance(value, str) and encodable(value) != value:
            raise UserError(
                f"{where} has half a character in {name!r} (the two of a surrogate pair belong "
                "together; no file or tokenizer takes one alone). Repair or remove the row."
            )
        if not isinstance(name, str):
            raise UserError(
                f"the names of columns must be texts, got {name!r} in {where}. Write "
                f"{str(name)!r}, or leave this column out."
            )


def _kind_of_all(key: str, items: Sequence[Any]) -> str:
    """Return which kind of sources a list has; empty if it has none.

    Raises:
        UserError: an item is not a source, or of another kind than the first.
    """
    first = _kind(items[0]) if items else ""
    for number, one in enumerate(items, start=1):
        if not first or _kind(one) != first:
            rule = f"a list of {first}" if first else _RULE
            why = "all items must be of one kind" if first and _kind(one) else ""
            got = f"a list whose item {number} is {shown(one)}"
            raise setting_error(key, rule, got, why)
    return first


def _kind(one: Any) -> str:
    """Name the kind of source that an item is, for an error; empty if it is none."""
    if isinstance(one, Mapping):
        return "rows, each a dict"
    if isinstance(one, str | os.PathLike):
        return "files or datasets"
    return "tables" if _is_table(one) or _is_list_of_rows(one) else ""


def _is_list_of_rows(one: Any) -> bool:
    return isinstance(one, list | tuple) and all(isinstance(row, Mapping) for row in one)


def _is_table(one: Any) -> bool:
    """Return whether it is a table that Arrow can read, or a dataset of Hugging Face."""
    if isinstance(one, type | Mapping):  # a DatasetDict is a Mapping
        return False
    return hasattr(one, "__arrow_c_stream__") or hasattr(one, "column_names")


def _rows_of_table(key: str, table: Any) -> list[dict[str, Any]]:
    """Return the rows of a table as a parquet file of it would have them: a NaN is None."""
    if not hasattr(table, "__arrow_c_stream__"):
        return list(table)
    import pyarrow  # only here, as in `sources`

    try:
        rows = pyarrow.table(table)
        unnamed = [one for one in rows.column_names if _UNNAMED_INDEX.fullmatch(one)]
        return list(rows.drop_columns(unnamed).to_pylist())
    except (pyarrow.ArrowException, TypeError, ValueError) as error:
        raise setting_error(
            key,
            "a table with columns of one type each, or a list of dicts",
            type(table).__name__,
            ": ".join(map(str, reversed(error.args))),
        ) from error
