"""Find the prompt, the gold answer and the id among the columns of a row.

Known layouts are recognised row by row; a mapping ``{role: column}`` overrides them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from difflib import get_close_matches
from numbers import Number
from typing import Any, Literal

from lit_grpo.data.rows.filters import MISSING
from lit_grpo.data.rows.sources import Row
from lit_grpo.types import UserError
from lit_grpo.types.settings import list_some

Role = Literal["prompt", "answer", "id"]

# Column names by role, in order of preference: plain files, verl and GSM8K. A dotted name reads a
# field of a nested column.
KNOWN_NAMES: Mapping[Role, tuple[str, ...]] = {
    "prompt": ("prompt", "question"),
    "answer": ("reward_model.ground_truth", "answer"),
}
ONE_VALUE = (str, Number, date)
ROWS_SHOWN = 5
_OTHER_ANSWERS = ("completion", "solution", "response", "output", "target", "label", "gold")


def prompt_value(row: Row, mapping: Mapping[str, str]) -> str | list[Any]:
    """Return the text or the list of messages in the row's prompt column."""
    name = column_name(row, "prompt", mapping)
    value = find(row, name)
    if value is MISSING:
        raise missing_column(row, "prompt", mapping)
    is_plain = isinstance(value, list) and not any(isinstance(one, Mapping) for one in value)
    if is_null(value) or not isinstance(value, str | list) or is_plain:
        got = "nothing" if is_null(value) else shown_value(value)
        raise UserError(
            f"{row.origin}: the prompt column {name!r} must hold text or a list of messages, got "
            f"{got}. Fill or remove the row, or set data.columns: {{prompt: NAME}}."
        )
    return value


def joined_parts(content: Any) -> Any:
    """Return the content of a message; one that is a list of parts, all of them text, as that text.

    Each part, ``{"type": "text", "text": ...}`` as in OpenAI's format, begins a line.
    """
    if not isinstance(content, list) or not content:
        return content
    texts = [part.get("text") for part in content if _part_type(part) == "text"]
    is_text = len(texts) == len(content) and all(isinstance(one, str) for one in texts)
    return "\n".join(texts) if is_text else content


def other_parts(content: Any) -> list[str]:
    """Return the types of the parts of a message that are not text, such as ``image_url``."""
    parts = content if isinstance(content, list) else []
    types = [_part_type(part) for part in parts]
    return list(dict.fromkeys(one for one in types if one and one != "text"))


def _part_type(part: Any) -> str:
    found = part.get("type") if isinstance(part, Mapping) else None
    return found if isinstance(found, str) else ""


def prompt_id(row: Row, mapping: Mapping[str, str]) -> str:
    """Return the id column as text; without a mapping for it, the file's stem and row number."""
    if "id" not in mapping:
        return row.id
    value = find(row, mapping["id"])
    if value is MISSING:
        raise missing_column(row, "id", mapping)
    if is_null(value):
        raise UserError(
            f"{row.origin}: the id column {mapping['id']!r} is null (logs refer to a prompt by "
            "its id). Fill it, or leave the id out of data.columns."
        )
    return id_text(value, row)


def id_text(value: Any, row: Row) -> str:
    """Return an id as text.

    Raises:
        UserError: it is neither text nor a number.
    """
    if fault := id_fault(value):
        raise UserError(
            f"{row.origin}: {fault}. Repair the column, or leave the id out of data.columns."
        )
    return to_text(value)


def id_fault(value: Any) -> str | None:
    """Return what is wrong with an id that is neither text nor a number."""
    if isinstance(value, ONE_VALUE):
        return None
    return f"an id must be text or a number, got {shown_value(value)}"


def list_rows(rows: Iterable[Row]) -> str:
    """Return where the first few rows come from, for an error message."""
    return list_some([row.origin for row in rows], ROWS_SHOWN, separator="; ")


def column_name(row: Row, role: Role, mapping: Mapping[str, str]) -> str | None:
    known = (name for name in KNOWN_NAMES[role] if find(row, name) is not MISSING)
    return mapping[role] if role in mapping else next(known, None)


def find(row: Row, name: str | None) -> Any:
    """Return the value of a column or, for ``a.b``, of a nested field; ``MISSING`` if absent."""
    if name is None or name in row.columns:
        return MISSING if name is None else row.columns[name]
    value: Any = row.columns
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return MISSING
        value = value[part]
    return value


def is_null(value: Any) -> bool:
    is_nan = isinstance(value, Number) and bool(value != value)
    is_empty = (isinstance(value, list) and not value) or (
        isinstance(value, str) and not value.strip()
    )
    return value is MISSING or value is None or is_nan or is_empty


def shown_value(value: Any) -> str:
    text = repr(value)
    return f"the {type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def to_text(value: Any) -> str:
    """Return a value as text; a list of texts and numbers becomes a JSON list of texts."""
    if isinstance(value, list):
        return json.dumps([to_text(one) for one in value], ensure_ascii=False)
    # pandas turns a column of integers with a missing value into floats.
    is_whole = isinstance(value, float) and value.is_integer()
    return str(int(value) if is_whole else value)


def list_columns(row: Row) -> str:
    """List the columns, quoted where a space or a capital is easily overlooked."""
    return ", ".join(one if re.fullmatch(r"[a-z0-9_.]+", one) else repr(one) for one in row.columns)


def guesses(row: Row, roles: Sequence[Role]) -> str:
    """Return a mapping to copy, with columns whose names differ in capitals or spaces alone.

    A gold answer is also known by some other names, which are not taken without being asked for.
    """
    plain = {name.strip().lower(): json.dumps(name, ensure_ascii=False) for name in row.columns}
    exact = {role: plain.get(role, "NAME") for role in roles if role not in row.columns}
    if exact.get("prompt") == "NAME" and isinstance(row.columns.get("messages"), list):
        exact["prompt"] = "messages"
    if exact.get("answer") == "NAME":
        exact["answer"] = next((plain[name] for name in _OTHER_ANSWERS if name in plain), "NAME")
    return ", ".join(f"{role}: {exact.get(role, 'NAME')}" for role in roles)


def missing_column(row: Row, role: Role, mapping: Mapping[str, str]) -> UserError:
    name, taken = mapping.get(role), {mapping[other] for other in mapping if other != role}
    taken |= {one for other, names in KNOWN_NAMES.items() if other != role for one in names}
    what = f"no column {name!r}" if name else f"no column that is recognised as the {role}"
    close = get_close_matches(name or role, [one for one in row.columns if one not in taken], n=1)
    if role == "prompt" and name is None and isinstance(row.columns.get("messages"), list):
        close = ["messages"]  # not taken by itself: the last one may be the answer
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    given = json.dumps(close[0], ensure_ascii=False) if close else "NAME"
    given = close[0] if close and re.fullmatch(r"[A-Za-z_][\w.]*", close[0]) else given
    fix = (
        f"Set data.columns: {{{role}: {given}}}. It holds for all files of the data: rename the "
        "columns of one that has others."
    )
    return UserError(
        f"{row.origin} has {what}{hint}; it has {list_columns(row)}. {fix}"
        f"{about_last_turn(row) if role == 'prompt' else ''}"
    )


def about_last_turn(row: Row) -> str:
    """Return advice on a conversation that ends with the gold answer, as in SFT data."""
    messages = row.columns.get("messages")
    last = messages[-1] if messages and isinstance(messages, list) else None
    if not isinstance(last, Mapping) or last.get("role") != "assistant":
        return ""
    return (
        " The last turn of messages is the assistant's: move its text from there to a column "
        "answer, or the prompt contains it."
    )
