"""Which column of a row is the prompt, the gold answer, the id.

Known layouts are recognised row by row; a mapping ``{role: column}`` overrides them.
Whether a gold answer can be parsed is for the rewards to say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal

from lit_grpo.data.sources import Row
from lit_grpo.types import UserError

Role = Literal["prompt", "answer", "id"]

# The names by which a role is known, the first that a row has: plain files, verl's, GSM8K's.
# A dotted name reaches into a nested column.
_KNOWN_NAMES: Mapping[Role, tuple[str, ...]] = {
    "prompt": ("prompt", "question"),
    "answer": ("reward_model.ground_truth", "answer"),
}
# GSM8K writes a solution and, on its last line, the gold: "#### 1,080"
_MARKED_GOLD = re.compile(r"^####[ \t]*(\S.*?)\s*\Z", re.MULTILINE)
_THOUSANDS_COMMA = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_ROWS_SHOWN = 5
_MISSING = object()


def prompt_value(row: Row, mapping: Mapping[str, str]) -> str | list[Any]:
    """The text or the list of messages in the row's prompt column."""
    name = _column_name(row, "prompt", mapping)
    value = _find(row, name)
    if value is _MISSING:
        raise _missing_column(row, "prompt", name)
    is_empty = _is_null(value) or value == []
    if is_empty or not isinstance(value, str | list):
        got = "nothing" if is_empty else f"the {type(value).__name__} {value!r}"
        raise UserError(
            f"{row.origin}: the prompt column {name!r} must hold text or a list of messages, got "
            f"{got}. Fill or remove the row, or set data.columns: {{prompt: NAME}}."
        )
    return value


def prompt_id(row: Row, mapping: Mapping[str, str]) -> str:
    """The value of the id column as text, or the file's stem and the row's number without one."""
    if "id" not in mapping:
        return row.id
    value = _find(row, mapping["id"])
    if value is _MISSING:
        raise _missing_column(row, "id", mapping["id"])
    if _is_null(value):
        raise UserError(
            f"{row.origin}: the id column {mapping['id']!r} is null (nobody could name this "
            "prompt). Fill it, or leave data.columns without an id."
        )
    return _to_text(value)


def gold_answers(
    rows: Sequence[Row], mapping: Mapping[str, str], *, required: bool
) -> list[str | None]:
    """The gold answer of each row, None where it is null or missing and not required.

    Where answers of a source end with GSM8K's ``#### 1,080``, its golds are what follows, here
    ``1080``, and an answer without it counts as null.

    Raises:
        ValueError: a required gold is null, or no row has the column that the mapping names.
    """
    values = [_find(row, _column_name(row, "answer", mapping)) for row in rows]
    if "answer" in mapping and all(value is _MISSING for value in values):
        raise _missing_column(rows[0], "answer", mapping["answer"])
    answers = [None if _is_null(value) else _to_text(value) for value in values]
    marked = {
        row.source
        for row, answer in zip(rows, answers, strict=True)
        if answer and _MARKED_GOLD.search(answer)
    }
    golds = [
        _after_mark(answer) if row.source in marked else answer
        for row, answer in zip(rows, answers, strict=True)
    ]
    without = [row for row, gold in zip(rows, golds, strict=True) if gold is None]
    if required and without:
        raise _null_golds(without, len(rows), mapping)
    return golds


def list_rows(rows: Iterable[Row]) -> str:
    """The places of the first few rows, for an error text."""
    places = [row.origin for row in rows]
    more = len(places) - _ROWS_SHOWN
    return "; ".join(places[:_ROWS_SHOWN]) + (f"; and {more} more" if more > 0 else "")


def _column_name(row: Row, role: Role, mapping: Mapping[str, str]) -> str | None:
    known = (name for name in _KNOWN_NAMES[role] if _find(row, name) is not _MISSING)
    return mapping[role] if role in mapping else next(known, None)


def _find(row: Row, name: str | None) -> Any:
    """The value of a column, of ``a.b`` in the nested column ``a``, or ``_MISSING``."""
    if name is None or name in row.columns:
        return _MISSING if name is None else row.columns[name]
    value: Any = row.columns
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _MISSING
        value = value[part]
    return value


def _is_null(value: Any) -> bool:
    is_nan = isinstance(value, float) and value != value
    return value is _MISSING or value is None or is_nan or not str(value).strip()


def _to_text(value: Any) -> str:
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False, default=str)
    # A column of integers with a hole in it is a column of floats once it went through pandas.
    is_whole = isinstance(value, float) and value.is_integer()
    return str(int(value) if is_whole else value)


def _after_mark(answer: str | None) -> str | None:
    match = _MARKED_GOLD.search(answer or "")
    return _THOUSANDS_COMMA.sub("", match[1]) if match else None


def _missing_column(row: Row, role: Role, name: str | None) -> ValueError:
    what = f"no column {name!r}" if name else f"no column that is known as the {role}"
    close = get_close_matches(name or role, row.columns, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return UserError(
        f"{row.origin} has {what}{hint}; it has {', '.join(row.columns)}. "
        f"Set data.columns: {{{role}: NAME}}."
    )


def _null_golds(without: list[Row], num_rows: int, mapping: Mapping[str, str]) -> ValueError:
    name = _column_name(without[0], "answer", mapping)
    where = f"in {name!r}" if name else f"in any column ({', '.join(without[0].columns)})"
    return UserError(
        f"{len(without)} of {num_rows} rows have no gold answer {where}: {list_rows(without)} (a "
        "reward has nothing to compare with). Fill or remove them, name the column with "
        "data.columns: {answer: NAME}, or set data.require_answer: false if no reward needs one."
    )
