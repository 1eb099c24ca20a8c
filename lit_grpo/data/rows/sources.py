"""Read rows from jsonl, parquet and csv files and Hugging Face datasets.

Every row records its source. Values, including nested ones, are plain Python objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_grpo.data.rows.files import READERS
from lit_grpo.data.rows.hf_datasets import open_dataset
from lit_grpo.types import UserError

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
    (of data files, or written by ``save_to_disk``) or an id on the Hub. A column of a csv
    file has numbers if that changes no cell, else text; an empty cell is None.

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
        return UserError(f"{wrong} Convert or rename the file.")
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
    return [
        Row(source=source, number=number, id=f"{path.stem}:{number}", columns=columns)
        for number, columns in READERS[path.suffix](path)
    ]


def _read_dataset(source: str) -> list[Row]:
    name, dataset = open_dataset(source)
    return [
        Row(source=source, number=number, id=f"{name}:{number}", columns=columns)
        for number, columns in enumerate(dataset.with_format(None), start=1)
    ]
