"""Choose the Arrow types of prepared rows, and write rows with them.

Nested values come out of parquet as they went in: dicts of one shape have a type of their own, and
dicts that differ, which Arrow would fill with nulls, are JSON by their type.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lit_grpo.types import UserError

ROWS_PER_GROUP = 10_000
JSON = pa.json_()
_SCALARS = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}
_FIX = "Repair the row, or leave the column out of the file."
_NOT_WRITABLE = (pa.ArrowException, OverflowError, ValueError)
_IN_WORDS = {pa.bool_(): "true or false", pa.int64(): "a whole number", pa.float64(): "a number"}


class _MixedTypes(Exception):
    """Two values have no type in common."""


def find_schema(
    rows: Iterable[tuple[str, Mapping[str, Any]]], columns: Mapping[str, pa.DataType]
) -> pa.Schema:
    """Return the types of the columns of some rows.

    Args:
        rows: Where each row comes from, for messages, and its columns; null where one is missing.
        columns: The columns that come first, with their types; the others follow in sorted order.

    Raises:
        UserError: a column holds values of different types; the message names two of them.
    """
    found: dict[str, pa.DataType] = dict(columns)
    first: dict[str, tuple[str, Any]] = {}
    for origin, row in rows:
        for name, value in row.items():
            if value is None or name in columns:
                continue
            try:
                found[name] = _merge(found.get(name, pa.null()), _type_of(value), at_top=True)
            except _MixedTypes as error:
                raise _mixed(name, first[name], (origin, value)) from error
            except _NOT_WRITABLE as error:
                raise UserError(f"{origin}: {name} cannot be written: {error}. {_FIX}") from error
            first.setdefault(name, (origin, value))
    others = sorted(found.keys() - columns.keys())
    return pa.schema([(name, _complete(found[name])) for name in (*columns, *others)])


def to_table(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """Return rows as a table with this schema."""
    of_json = [field.name for field in schema if field.type == JSON]
    storage = pa.schema(
        [field.with_type(pa.string()) if field.type == JSON else field for field in schema]
    )
    texts = [row | {name: _to_json(row.get(name)) for name in of_json} for row in map(dict, rows)]
    return pa.Table.from_pylist(texts, schema=storage).cast(schema)


def write_parquet(
    path: Path, rows: Iterable[tuple[str, Mapping[str, Any]]], schema: pa.Schema
) -> None:
    """Write rows as a parquet file, the same bytes for the same rows.

    Args:
        path: The file.
        rows: Where each row comes from, for messages, and its columns.
        schema: As `find_schema` returns it.

    Raises:
        UserError: a value cannot be written by its type.
    """
    with pq.ParquetWriter(path, schema, compression="zstd", version="2.6") as writer:
        left = iter(rows)
        while some := list(islice(left, ROWS_PER_GROUP)):
            try:
                table = to_table([row for _, row in some], schema)
            except _NOT_WRITABLE:
                _find_not_writable(some, schema)
                raise
            writer.write_table(table)


def _find_not_writable(rows: Sequence[tuple[str, Mapping[str, Any]]], schema: pa.Schema) -> None:
    """Raise UserError that names the first value that its column cannot have."""
    for origin, row in rows:
        for field in schema:
            try:
                to_table([{field.name: row.get(field.name)}], pa.schema([field]))
            except _NOT_WRITABLE as error:
                raise UserError(
                    f"{origin}: {field.name} cannot be written: {error}. {_FIX}"
                ) from error


def _type_of(value: Any) -> pa.DataType:
    if value is None:
        return pa.null()
    if isinstance(value, dict):
        if any(isinstance(one, float) and not math.isfinite(one) for one in value.values()):
            raise ValueError(f"{value} is no JSON")
        fields = {name: _type_of(one) for name, one in value.items()}
        is_json = not fields or any(one == JSON for one in fields.values())
        return JSON if is_json else pa.struct(sorted(fields.items()))
    if isinstance(value, list | tuple):
        return _type_of_items(value)
    if isinstance(value, int) and not isinstance(value, bool):
        pa.scalar(value, pa.int64())  # raises for a number that is too large
    known: pa.DataType | None = _SCALARS.get(type(value))
    return pa.scalar(value).type if known is None else known


def _type_of_items(values: Sequence[Any]) -> pa.DataType:
    items = pa.null()
    for value in values:
        items = _merge(items, _type_of(value))
    return JSON if items == JSON else pa.list_(items)


def _merge(one: pa.DataType, other: pa.DataType, *, at_top: bool = False) -> pa.DataType:
    """Return the type that holds values of both.

    Raises:
        _MixedTypes: there is none, at the top of a column; deeper, it is JSON.
    """
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if {one, other} == {pa.int64(), pa.float64()}:
        return pa.float64()
    if pa.types.is_list(one) and pa.types.is_list(other):
        items = _merge(one.value_type, other.value_type)
        return JSON if items == JSON else pa.list_(items)
    if pa.types.is_struct(one) and pa.types.is_struct(other) and one.names == other.names:
        types = [_merge(a.type, b.type) for a, b in zip(one.fields, other.fields, strict=True)]
        return JSON if JSON in types else pa.struct(list(zip(one.names, types, strict=True)))
    if at_top and not (_is_nested(one) and _is_nested(other)):
        raise _MixedTypes
    return JSON


def _is_nested(kind: pa.DataType) -> bool:
    return bool(kind == JSON or pa.types.is_nested(kind))


def _complete(kind: pa.DataType) -> pa.DataType:
    """Return a type without nulls of no type, which lists that are all empty have."""
    if pa.types.is_null(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_complete(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _complete(field.type)) for field in kind])
    return kind


def _to_json(value: Any) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False, allow_nan=False)


def _mixed(name: str, first: tuple[str, Any], second: tuple[str, Any]) -> UserError:
    one, other = (f"{_in_words(value)} in {origin}" for origin, value in (first, second))
    return UserError(
        f"{name} must have values of one type, got {one} and {other} (a column of parquet has one "
        f"type). {_FIX}"
    )


def _in_words(value: Any) -> str:
    if isinstance(value, dict | list | tuple):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, str):
        return f"the string {value[:40]!r}"
    return f"{_IN_WORDS.get(_SCALARS.get(type(value)), f'a {type(value).__name__}')} ({value})"
