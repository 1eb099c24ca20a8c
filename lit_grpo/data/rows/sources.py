"""Read rows from jsonl, parquet and csv files and Hugging Face datasets.

Every row records its source. Values, including nested ones, are plain Python objects.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from lit_grpo.data.rows.files import READERS
from lit_grpo.data.rows.hf_datasets import open_dataset
from lit_grpo.data.rows.json_lines import STARTS_ARRAY, array_error
from lit_grpo.types import UserError

log = logging.getLogger(__name__)

_CONVERTED = {
    ".tsv": ("read_csv", r"sep='\t', "),
    ".xlsx": ("read_excel", ""),
    ".xls": ("read_excel", ""),
}
"""Suffix of a table that is not read -> pandas' reader of it, and its argument."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the data."""

    source: str
    """The file or dataset, as written in the config."""
    number: int
    """Number of the row, from 1; in jsonl the line number."""
    id: str
    columns: Mapping[str, Any]

    @property
    def origin(self) -> str:
        """The source and the number, for messages."""
        return f"{self.source}, row {self.number}"


def read_rows(source: str) -> list[Row]:
    """Read all rows of a .jsonl, .parquet or .csv file, a dataset directory or a Hub dataset.

    A dataset is written ``id``, ``id:split`` or ``id:subset:split``, where ``id`` is a directory
    (of data files, or written by ``save_to_disk``) or an id on the Hub. Cells of a csv file are
    text as written; an empty cell is None.

    Raises:
        UserError: the source does not exist, is empty, or has a row that cannot be read.
    """
    path = Path(source).expanduser()
    if path.suffix in READERS:
        rows = _read_file(source, path)
    elif path.is_file() or (path.suffix in _CONVERTED and not path.exists()):
        raise _unread(source, path)
    else:
        rows = _read_dataset(source)
    if not rows:
        raise UserError(
            f"{source} is empty: it has no rows. Write the file again or choose a different one."
        )
    return rows


def _missing(source: str, path: Path) -> UserError:
    return UserError(f"{source}: no such file (looked for {path.absolute()}). Check the path.")


def _unread(source: str, path: Path) -> UserError:
    """Return the error for a file in a format that is not read, with how to convert it."""
    if not path.is_file():
        return _missing(source, path)
    suffixes = ", ".join(READERS)
    wrong = f"{source} must end in {suffixes}, got {path.suffix!r} (the suffix selects the reader)."
    if (reader := _CONVERTED.get(path.suffix)) is None:
        if path.suffix != ".json":
            return UserError(f"{wrong} Convert or rename the file.")
        with path.open("rb") as file:
            is_array = STARTS_ARRAY.match(file.read(1000)) is not None
        fix = "If each line is one JSON object, rename it to end in .jsonl."
        return array_error(path) if is_array else UserError(f"{wrong} {fix}")
    new = str(path.with_suffix(".jsonl"))
    return UserError(
        f'{wrong} Convert it: python -c "import pandas; pandas.{reader[0]}'
        f"({str(path)!r}, {reader[1]}dtype=str).to_json({new!r}, orient='records', lines=True)\""
    )


def _read_file(source: str, path: Path) -> list[Row]:
    if path.is_dir():
        raise UserError(
            f"{source} is a directory, but a name that ends in {path.suffix} must be that of a "
            "file. Write a file in it; to read all its files as a dataset, rename it."
        )
    if not path.is_file():
        raise _missing(source, path)
    rows = [
        Row(source=source, number=number, id=f"{path.stem}:{number}", columns=columns)
        for number, columns in READERS[path.suffix](path)
    ]
    if path.suffix == ".csv":
        _log_texts_of_numbers(source, rows)
    return rows


@rank_zero_only
def _log_texts_of_numbers(source: str, rows: Sequence[Row]) -> None:
    """Log which columns of a csv file have numbers, which are text."""
    names = rows[0].columns if rows else ()
    cells = {name: [one for row in rows if (one := row.columns[name])] for name in names}
    numbers = [name for name, found in cells.items() if found and all(map(_is_number, found))]
    if numbers:
        log.info(
            "%s: the cells of a csv file are text, also in %s: a reward function gets %r, and "
            "converts it to calculate or compare with numbers",
            *(source, ", ".join(numbers), cells[numbers[0]][0]),
        )


def _is_number(cell: str) -> bool:
    return re.fullmatch(r"-?\d+(\.\d+)?", cell, re.ASCII) is not None


def _read_dataset(source: str) -> list[Row]:
    name, dataset = open_dataset(source)
    return [
        Row(source=source, number=number, id=f"{name}:{number}", columns=columns)
        for number, columns in enumerate(dataset.with_format(None), start=1)
    ]
