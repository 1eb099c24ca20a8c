"""Read the rows of a jsonl file, with errors that name the row."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lit_grpo.types import UserError
from lit_grpo.types.json_text import parse_json

MAX_LINE_BYTES = 100_000_000
"""A longer line of a jsonl file is not a row."""

_HALF_CHARACTER = re.compile(rb"\\u[dD][89a-fA-F]")
_ROWS_BETWEEN_CR = re.compile(rb"\}[ \t]*\r\s*\{")
STARTS_ARRAY = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*(\{|$)")
_JSON_NAMES = {list: "a list", str: "text", bool: "true or false", type(None): "null"}

MAGIC = (
    (b"\x1f\x8b", "gzip", "Unpack it: gunzip, then use the file."),
    (b"PAR1", "parquet", "Rename it to end in .parquet."),
    (b"PK\x03\x04", "a zip archive or a spreadsheet", "Unpack it, or save it as .csv."),
)
"""The first bytes of a format, its name, and what to do."""


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each line that is not blank as its number, from 1, and its object.

    Raises:
        UserError: a line is no JSON object, or the file is not UTF-8.
    """
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
            if len(line) > MAX_LINE_BYTES:
                raise UserError(
                    f"{path}, row {number} has a line of more than {MAX_LINE_BYTES / 1e6:g} MB (at "
                    f"most {MAX_LINE_BYTES / 1e6:g} MB are read: it is probably no row, but a "
                    "whole file without line breaks). Write one JSON object a line."
                )
            if number == 1:
                refuse_other_formats(line, path)
                is_whole = not (line.rstrip().endswith(b"]") and file.peek(1))
                if is_whole and STARTS_ARRAY.match(line):
                    raise array_error(path)
            if line.strip():
                yield number, _parse_line(line, f"{path}, row {number}")


def array_error(path: Path) -> UserError:
    """Return the error for a file that is one array, with how to convert it."""
    new = path.with_suffix(".jsonl")
    if new.exists():
        new = new.with_stem(f"{path.stem}_lines")
    return UserError(
        f"{path} is one JSON array, not one JSON object a line. Convert it: python -c "
        f"\"import json; open({str(new)!r}, 'w').writelines(json.dumps(one) + '\\n' for one in "
        f"json.load(open({str(path)!r}, encoding='utf-8-sig')))\""
    )


def _parse_line(line: bytes, origin: str) -> dict[str, Any]:
    fix = "Each line must hold one JSON object: repair or remove this line."
    try:
        value = parse_json(line, _object)
    except json.JSONDecodeError as error:
        if _ROWS_BETWEEN_CR.search(line):
            raise UserError(
                f"{origin} has several rows: the lines of the file end in CR alone, which ends no "
                "line here. Save it with line ends of LF or CRLF."
            ) from error
        reason = f"{error.msg.removesuffix(' at')} at character {error.pos + 1} of {excerpt(line)}"
        raise UserError(f"{origin} is not JSON: {reason}. {fix}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{origin} is not UTF-8: {error}. Save the file as UTF-8.") from error
    except _RepeatedKey as error:
        raise UserError(
            f"{origin} has the key {error} more than once (the last one would replace the others). "
            f"{fix}"
        ) from error
    except ValueError as error:
        raise UserError(f"{origin} cannot be read: {error}. {fix}") from error
    if _HALF_CHARACTER.search(line) and not _is_text(value):
        raise UserError(
            f"{origin} has a \\u escape of half a character (the two of a surrogate pair belong "
            f"together; no file or tokenizer takes one alone). {fix}"
        )
    if not isinstance(value, dict):
        raise UserError(
            f"{origin} is not a JSON object but {_JSON_NAMES.get(type(value), 'a number')}. {fix}"
        )
    return value


class _RepeatedKey(ValueError):
    """A JSON object has the same key twice."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _RepeatedKey(repr(next(name for name in names if names.count(name) > 1)))
    return found


def refuse_other_formats(start: bytes, path: Path) -> None:
    """Refuse UTF-16, which spreadsheets and some shells write, and files of other formats.

    Args:
        start: The first bytes of the file, at least four if it has them.
    """
    for magic, kind, fix in MAGIC:
        if start.startswith(magic):
            raise UserError(f"{path} is {kind}, whatever its suffix says. {fix}")
    if json.detect_encoding(start).startswith("utf-16"):
        raise UserError(f"{path} is UTF-16, and only UTF-8 is read. Save the file as UTF-8.")


def _is_text(value: Any) -> bool:
    """Return whether all text in a value can be written in UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def excerpt(line: bytes) -> str:
    """Return the beginning of a line, for a message."""
    text = line.decode(errors="replace").strip()
    return repr(text if len(text) <= 60 else text[:57] + "...")
