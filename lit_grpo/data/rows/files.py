"""Read the rows of csv and parquet files; `READERS` has a reader for each suffix."""

from __future__ import annotations

import csv
import io
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_grpo.data.rows.json_lines import excerpt, read_jsonl, refuse_other_formats
from lit_grpo.types import UserError
from lit_grpo.types.json_text import parse_json

if TYPE_CHECKING:
    import pyarrow

_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}
_MAX_CELL_CHARACTERS = 2**31 - 1
_NUMBER = re.compile(r"-?\d+(\.\d+)?", re.ASCII)
_MAX_DIGITS = 18  # more may not fit in an int64

log = logging.getLogger(__name__)

_Numbered = Iterator[tuple[int, dict[str, Any]]]


def _read_parquet(path: Path) -> _Numbered:
    import pyarrow.parquet  # only here: built-in tasks and text files need no pyarrow

    try:
        table = pyarrow.parquet.ParquetFile(path).read()
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{path} is not a complete parquet file: {str(error).rstrip('.')}. Write it again."
        ) from error
    of_json = json_columns(table.schema)
    return enumerate((decoded(row, of_json) for row in table.to_pylist()), start=1)


def json_columns(schema: pyarrow.Schema) -> list[str]:
    """Return the names of the columns of type JSON, which Arrow stores as text."""
    import pyarrow

    return [field.name for field in schema if isinstance(field.type, pyarrow.JsonType)]


def decoded(row: dict[str, Any], of_json: Sequence[str]) -> dict[str, Any]:
    """Return a row in which the JSON texts of these columns are parsed."""
    if not of_json:
        return row
    texts = {name: row[name] for name in of_json if row[name] is not None}
    return row | {name: parse_json(text) for name, text in texts.items()}


def _read_csv(path: Path) -> _Numbered:
    csv.field_size_limit(_MAX_CELL_CHARACTERS)
    text = _decode(path)
    _check_separator(text, path)
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = next(lines, [])
        _check_header(header, path)
        rows: list[list[str]] = []
        for cells in filter(None, lines):
            _check_cells(cells, header, f"{path}, row {len(rows) + 1} (line {lines.line_num})")
            rows.append(cells)
    except csv.Error as error:
        raise UserError(
            f"{path}, line {lines.line_num} is not csv: {error}. Close or double its quotes."
        ) from error
    columns = [
        _typed([cells[place] for cells in rows], f"{path}: column {name!r}")
        for place, name in enumerate(header)
    ]
    is_number = [any(isinstance(one, int | float) for one in values) for values in columns]
    if names := ", ".join(compress(header, is_number)):
        log.info("%s: read as numbers, and given to rewards as such: %s", path, names)
    values = zip(*columns, strict=True)
    return enumerate((dict(zip(header, row, strict=True)) for row in values), start=1)


def _typed(cells: Sequence[str], what: str) -> list[Any]:
    """Return the values of a column: None for an empty cell, and text or numbers.

    A column becomes numbers only if each cell survives the way through ``int`` or ``float`` and
    back unchanged: one with ``020`` or ``1.50`` stays text.
    """
    filled = [cell for cell in cells if cell]
    for kind in (int, float):
        if filled and all(_writes(kind, cell) for cell in filled):
            return [kind(cell) if cell else None for cell in cells]
    if filled and all(_NUMBER.fullmatch(cell) for cell in filled):
        other = next(cell for cell in filled if not _writes(float, cell))
        log.info("%s is read as text, because %s would change if read as a number", what, other)
    return [cell or None for cell in cells]


def _writes(kind: type[int] | type[float], cell: str) -> bool:
    """Return whether a cell is a number as Python writes it; whole ones are of both types."""
    is_whole = "." not in cell
    if not _NUMBER.fullmatch(cell) or len(cell) > _MAX_DIGITS or (kind is int and not is_whole):
        return False
    return cell == str(int(cell) if is_whole else float(cell))


def _decode(path: Path) -> str:
    content = path.read_bytes()
    refuse_other_formats(content[:4], path)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path}, line {line} is not UTF-8: {error}. Save the file as UTF-8."
        ) from error


def _check_separator(text: str, path: Path) -> None:
    """Refuse a file whose columns are separated by something else, as spreadsheets may write it."""
    first_line = text.partition("\n")[0].strip()
    unquoted = re.sub(r'"[^"]*"', "", first_line)
    separator = next((one for one in _SEPARATORS if one in unquoted), "")
    if separator and "," not in unquoted:
        new = path.with_stem(f"{path.stem}_commas")
        raise UserError(
            f"{path}: columns must be separated by commas, but the first line, "
            f"{excerpt(first_line.encode())}, has "
            f"{_SEPARATORS[separator]} and no comma. Save it with commas, or convert it: python -c "
            f'"import pandas; pandas.read_csv({str(path)!r}, sep={separator!r}, dtype=str)'
            f'.to_csv({str(new)!r}, index=False)"'
        )


def _check_header(header: list[str], path: Path) -> None:
    duplicates = {name for name in header if header.count(name) > 1}
    if duplicates:
        raise UserError(
            f"{path}: column names must be unique, got {sorted(duplicates)} more than once in the "
            "first line (one column would replace the other). Rename them."
        )


def _check_cells(cells: list[str], header: list[str], origin: str) -> None:
    if len(cells) != len(header):
        fix = "Put cells that contain commas into double quotes."
        if len(cells) < len(header):
            fix = "Write a comma for each empty cell at its end, or close an open double quote."
        raise UserError(
            f"{origin} has {len(cells)} cells, but the first line names {len(header)} columns "
            f"({', '.join(header)}). {fix}"
        )


READERS: dict[str, Callable[[Path], _Numbered]] = {
    ".jsonl": read_jsonl,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}
