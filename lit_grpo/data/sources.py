"""Read rows from jsonl, parquet and csv files and Hugging Face datasets.

Every row records its source. Values, including nested ones, are plain Python objects.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_grpo.data.json_lines import excerpt, read_jsonl, refuse_other_formats
from lit_grpo.types import UserError, parse_json
from lit_grpo.types.spelling import did_you_mean

if TYPE_CHECKING:
    import pyarrow

# org/name, org/name:split, org/name:subset:split; a split may be a slice, train[:100]
_DATASET = re.compile(
    r"(?P<path>[^:]+)(?::(?P<subset>[^:\[\]]+)(?=:))?(?::(?P<split>[^:\[\]]+(?:\[[^\]]*\])?))?"
)
_HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}
_CONVERTED = {
    ".tsv": ("read_csv", r"sep='\t', "),
    ".xlsx": ("read_excel", ""),
    ".xls": ("read_excel", ""),
}
"""Suffix of a table that is not read -> pandas' reader of it, and its argument."""
_MISTYPED = 0.85
"""Similarity of a name with that of a file from which it was meant, rather than a dataset's id."""
_MAX_CELL_CHARACTERS = 2**31 - 1

_Numbered = Iterator[tuple[int, dict[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the data."""

    source: str
    """The file or dataset, as written in the config."""
    number: int
    """From 1; in jsonl the line number."""
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
    if path.suffix in _READERS:
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
    suffixes = ", ".join(_READERS)
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
        for number, columns in _READERS[path.suffix](path)
    ]


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


_READERS: dict[str, Callable[[Path], _Numbered]] = {
    ".jsonl": read_jsonl,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}


def _read_dataset(source: str) -> list[Row]:
    name, dataset = open_dataset(source)
    return [
        Row(source=source, number=number, id=f"{name}:{number}", columns=columns)
        for number, columns in enumerate(dataset.with_format(None), start=1)
    ]


def open_dataset(source: str, *, streaming: bool = False) -> tuple[str, Any]:
    """Return the short name of a dataset and the dataset, an ``IterableDataset`` if it is streamed.

    Raises:
        UserError: there is none.
    """
    match = _DATASET.fullmatch(source)
    path = Path(match["path"]).expanduser() if match else Path(source)
    if match is None or not (path.is_dir() or _HUB_ID.fullmatch(match["path"])):
        raise UserError(
            f"{source}: no such file or directory (looked for {path.absolute()}), and it is not a "
            "dataset id. Write a path, or id, id:split or id:subset:split."
        )
    if path.suffix and path.parent.is_dir() and not path.is_dir():
        files = [one.name for one in path.parent.iterdir() if one.suffix in _READERS]
        if hint := did_you_mean(path.name, files, similarity=_MISTYPED):
            raise UserError(f"{source}: no such file (looked for {path.absolute()}).{hint}")
    if path.is_dir():  # datasets names them after their last part, which . does not have
        path = Path(os.path.abspath(path))
    dataset = _load_dataset(source, path, match["subset"], match["split"], streaming=streaming)
    return f"{path.name}-{dataset.split}" if dataset.split else path.name, dataset


def _load_dataset(
    source: str, path: Path, subset: str | None, split: str | None, *, streaming: bool
) -> Any:
    import datasets  # takes a second to import, and most runs read files

    is_saved = (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()
    if not is_saved and subset is None:
        _refuse_several_formats(source, path)
    try:
        if is_saved:
            dataset = datasets.load_from_disk(str(path))
        else:
            dataset = datasets.load_dataset(str(path), subset, split=split, streaming=streaming)
    except Exception as error:  # the Hub, the network and the file formats raise many kinds
        while error.__cause__ is not None:  # the wrapped exception does not name the file
            error = error.__cause__  # type: ignore[assignment]
        raise UserError(
            f"{source}: no dataset could be loaded ({type(error).__name__}: {error}). Write an "
            "existing file or directory, or a Hub dataset as id, id:split or id:subset:split."
        ) from error
    if isinstance(dataset, Mapping):
        chosen = _choose_split(source, dataset, split)
        if split is None and path.is_dir() and not is_saved:
            _refuse_left_out(source, path, next(iter(dataset)))
        return chosen
    if is_saved and split:
        raise UserError(
            f"{source} names the split {split!r}, but {path} holds one dataset without splits. "
            f"Write {path}."
        )
    return dataset.to_iterable_dataset() if is_saved and streaming else dataset


def _refuse_several_formats(source: str, directory: Path) -> None:
    formats = {file.suffix for file in _visible_files(directory)} & set(_READERS)
    if len(formats) > 1:
        raise UserError(
            f"{source} has files of several formats ({', '.join(sorted(formats))}), of which only "
            "one would be read. Name the files, in a list if there are several."
        )


def _refuse_left_out(source: str, directory: Path, split: str) -> None:
    """Refuse a directory of whose files ``datasets`` reads only those with a split in the name."""
    import datasets
    from datasets.data_files import FILES_TO_IGNORE

    splits = datasets.load_dataset_builder(str(directory)).config.data_files
    read = {Path(file).resolve() for files in splits.values() for file in files}
    suffixes = {file.suffix for file in read}
    left_out = [
        file
        for file in _visible_files(directory)
        if file.suffix in suffixes and file.name not in FILES_TO_IGNORE
        if file.resolve() not in read
    ]
    if left_out:
        raise UserError(
            f"{source} has only the split {split} by the names of its files, which leaves out "
            f"{min(left_out).relative_to(directory)}. Write {source}:{split}, or name the files, "
            "in a list if there are several."
        )


def _visible_files(directory: Path) -> list[Path]:
    """Return the files of a directory without hidden ones, which ``datasets`` does not read."""
    return [
        file
        for file in directory.rglob("*")
        if file.is_file()
        and not any(part.startswith((".", "__")) for part in file.relative_to(directory).parts)
    ]


def _choose_split(source: str, splits: Mapping[str, Any], split: str | None) -> Any:
    names = list(splits)
    if split is None and len(names) > 1:
        raise UserError(
            f"{source} must name one of its splits {', '.join(names)} (it has several). "
            f"Write {source}:{names[0]}."
        )
    if split is not None and split not in splits:
        raise UserError(
            f"{source}: there is no split {split!r}, only {', '.join(names)}. "
            f"Write {source.removesuffix(split)}{names[0]}."
        )
    return splits[split or names[0]]
