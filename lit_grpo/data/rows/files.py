"""Read the rows of csv and parquet files; `READERS` has a reader for each suffix."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_grpo.data.rows.json_lines import excerpt, read_jsonl, refuse_other_formats
from lit_grpo.types import UserError
from lit_grpo.types.json_text import parse_json

if TYPE_CHECKING:
    import pyarrow

_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}
_MAX_CELL_CHARACTERS = 2**31 - 1

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
        for number, cells in enumerate(filter(None, lines), start=1):
            _check_cells(cells, header, f"{path}, row {number} (line {lines.line_num})")
            yield number, {k: cell or None for k, cell in zip(header, cells, strict=True)}
    except csv.Error as error:
        raise UserError(
            f"{path}, line {lines.line_num} is not csv: {error}. Close or double its quotes."
        ) from error


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
