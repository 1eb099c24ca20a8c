"""Find the prompt, the gold answer and the id among the columns of a row.

Known layouts are recognised row by row; a mapping ``{role: column}`` overrides them. Gold answers
are not parsed here: what they mean is up to the rewards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date
from difflib import get_close_matches
from numbers import Number
from typing import Any, Literal

from lit_grpo.data.rows.sources import Row
from lit_grpo.types import UserError, list_some, parse_json

Role = Literal["prompt", "answer", "id"]

# Column names by role, in order of preference: plain files, verl and GSM8K. A dotted name reads a
# field of a nested column.
_KNOWN_NAMES: Mapping[Role, tuple[str, ...]] = {
    "prompt": ("prompt", "question"),
    "answer": ("reward_model.ground_truth", "answer"),
}
# GSM8K writes a solution and, on its last line, the gold answer: "#### 1,080"
_MARKED_GOLD = re.compile(r"^####[ \t]*(\S.*?)\s*\Z", re.MULTILINE)
_THOUSANDS_COMMA = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_ONE_VALUE = (str, Number, date)
_ROWS_SHOWN = 5
_MISSING = object()


def prompt_value(row: Row, mapping: Mapping[str, str]) -> str | list[Any]:
    """Return the text or the list of messages in the row's prompt column."""
    name = _column_name(row, "prompt", mapping)
    value = _find(row, name)
    if value is _MISSING:
        raise _missing_column(row, "prompt", name)
    is_plain = isinstance(value, list) and not any(isinstance(one, Mapping) for one in value)
    if _is_null(value) or not isinstance(value, str | list) or is_plain:
        got = "nothing" if _is_null(value) else _shown(value)
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
    value = _find(row, mapping["id"])
    if value is _MISSING:
        raise _missing_column(row, "id", mapping["id"])
    if _is_null(value):
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
    return _to_text(value)


def id_fault(value: Any) -> str | None:
    """Return what is wrong with an id that is neither text nor a number."""
    if isinstance(value, _ONE_VALUE):
        return None
    return f"an id must be text or a number, got {_shown(value)}"


def gold_answers(
    rows: Sequence[Row], mapping: Mapping[str, str], *, required: bool
) -> list[str | None]:
    """Return the gold answer of each row, or None where it is null or missing and not required.

    If any answer of a file or dataset ends with GSM8K's mark, ``#### 1,080``, its gold answers are
    the text after the mark without thousands commas, here ``1080``, and an answer without the mark
    counts as null.
    An answer that is a list of texts or numbers becomes ``["1/2", "0.5"]``.

    Raises:
        UserError: a required answer is null, an answer is no text, or no row has the column that
            the mapping names.
    """
    for row in rows:
        if fault := answer_fault(row, mapping):
            raise UserError(
                f"{row.origin}: {fault}. Name a column or a field of it by data.columns: {{answer: "
                "NAME.FIELD}, or write the answer as text (JSON, if a reward of yours reads that)."
            )
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
    unanswered = [row for row, gold in zip(rows, golds, strict=True) if gold is None]
    if required and unanswered:
        raise _null_golds(unanswered, len(rows), mapping)
    return golds


def given_answer(answer: str, columns: Mapping[str, Any]) -> str | list[Any]:
    """Return a gold answer, or the list of equal answers that the row gives in its place."""
    return next((one for one in _lists(columns) if _to_text(one) == answer), answer)


def answer_place(answer: str, columns: Mapping[str, Any]) -> str:
    """Return where in a row a gold answer stands: ``column answer, after ####``; empty if unknown.

    The names of known layouts are looked at first, then the other columns.
    """
    row = Row(source="", number=1, id="", columns=columns)
    for name in (*_KNOWN_NAMES["answer"], *columns):
        value = _find(row, name)
        text = _to_text(value) if isinstance(value, (*_ONE_VALUE, list)) else ""
        if answer in (text, _after_mark(text)):
            return f"column {name}" + ("" if answer == text else ", after ####")
    return ""


def first_of(answer: Any) -> Any:
    """Return the first of a list of equal answers as text, and anything else as it is."""
    is_list = isinstance(answer, list) and all(isinstance(one, _ONE_VALUE) for one in answer)
    return _to_text(answer[0]) if answer and is_list else answer


def contradict(one: str, other: str) -> bool:
    """Return whether two gold answers, each a text or a list of equal ones, share none."""
    return one != other and _equal_answers(one).isdisjoint(_equal_answers(other))


def _equal_answers(answer: str) -> set[str]:
    with suppress(ValueError):
        value = parse_json(answer)
        if value and isinstance(value, list) and all(isinstance(one, str) for one in value):
            return set(value)
    return {answer}


def _lists(columns: Mapping[str, Any]) -> Iterator[list[Any]]:
    for value in columns.values():
        if isinstance(value, Mapping):
            yield from _lists(value)
        elif isinstance(value, list) and value:
            yield value


def answer_fault(row: Row, mapping: Mapping[str, str]) -> str | None:
    """Return what is wrong with a gold answer that is neither text, a number nor a list of them."""
    name = _column_name(row, "answer", mapping)
    value = _find(row, name)
    items = value if isinstance(value, list) else [value]
    if _is_null(value) or all(isinstance(one, _ONE_VALUE) for one in items):
        return None
    return (
        f"the answer column {name!r} must hold text, a number or a list of these, got "
        f"{_shown(value)}"
    )


def list_rows(rows: Iterable[Row]) -> str:
    """Return where the first few rows come from, for an error message."""
    return list_some([row.origin for row in rows], _ROWS_SHOWN, separator="; ")


def _column_name(row: Row, role: Role, mapping: Mapping[str, str]) -> str | None:
    known = (name for name in _KNOWN_NAMES[role] if _find(row, name) is not _MISSING)
    return mapping[role] if role in mapping else next(known, None)


def _find(row: Row, name: str | None) -> Any:
    """Return the value of a column or, for ``a.b``, of a nested field; ``_MISSING`` if absent."""
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
    is_empty = value == [] or (isinstance(value, str) and not value.strip())
    return value is _MISSING or value is None or is_nan or is_empty


def _shown(value: Any) -> str:
    text = repr(value)
    return f"the {type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _to_text(value: Any) -> str:
    """Return a value as text; of a list of texts and numbers, that of a list of texts in JSON."""
    if isinstance(value, list):
        return json.dumps([_to_text(one) for one in value], ensure_ascii=False)
    # pandas turns a column of integers with a missing value into floats.
    is_whole = isinstance(value, float) and value.is_integer()
    return str(int(value) if is_whole else value)


def _after_mark(answer: str | None) -> str | None:
    match = _MARKED_GOLD.search(answer or "")
    return _THOUSANDS_COMMA.sub("", match[1]) if match else None


def _names(row: Row) -> str:
    """List the columns, quoted where a space or a capital is easily overlooked."""
    return ", ".join(one if re.fullmatch(r"[a-z0-9_.]+", one) else repr(one) for one in row.columns)


def _guesses(row: Row, roles: Sequence[Role]) -> str:
    """Return a mapping to copy, with columns whose names differ in capitals or spaces alone."""
    plain = {name.strip().lower(): json.dumps(name, ensure_ascii=False) for name in row.columns}
    exact = {role: plain.get(role, "NAME") for role in roles if role not in row.columns}
    if exact.get("prompt") == "NAME" and isinstance(row.columns.get("messages"), list):
        exact["prompt"] = "messages"
    return ", ".join(f"{role}: {exact.get(role, 'NAME')}" for role in roles)


def _missing_column(row: Row, role: Role, name: str | None) -> UserError:
    what = f"no column {name!r}" if name else f"no column that is recognised as the {role}"
    close = get_close_matches(name or role, row.columns, n=1)
    if role == "prompt" and name is None and isinstance(row.columns.get("messages"), list):
        close = ["messages"]  # not taken by itself: the last one may be the answer
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    given = json.dumps(close[0], ensure_ascii=False) if close else "NAME"
    given = close[0] if close and re.fullmatch(r"[A-Za-z_][\w.]*", close[0]) else given
    return UserError(
        f"{row.origin} has {what}{hint}; it has {_names(row)}. "
        f"Set data.columns: {{{role}: {given}}}.{_about_last_turn(row) if role == 'prompt' else ''}"
    )


def _about_last_turn(row: Row) -> str:
    """Say what to do with a conversation that ends with the gold answer, as rows of SFT do."""
    messages = row.columns.get("messages")
    last = messages[-1] if messages and isinstance(messages, list) else None
    if not isinstance(last, Mapping) or last.get("role") != "assistant":
        return ""
    return (
        " The last turn of messages is the assistant's: move its text from there to a column "
        "answer, or the prompt contains it."
    )


def _null_golds(rows: list[Row], num_rows: int, mapping: Mapping[str, str]) -> UserError:
    names = [_column_name(row, "answer", mapping) for row in rows]
    if len(rows) == num_rows and not any(names):
        return _no_gold_column(rows, mapping)
    where = f"in {names[0]!r}" if names[0] else f"in any column ({_names(rows[0])})"
    return UserError(
        f"{len(rows)} of {num_rows} rows have no gold answer {where}: {list_rows(rows)} (rewards "
        "compare completions with it). Fill or remove them, name the column with "
        f"data.columns: {{{_guesses(rows[0], ['answer'])}}}, or set data.require_answer: false if "
        f"no reward needs one.{_about_last_turn(rows[0])}"
    )


def _no_gold_column(rows: list[Row], mapping: Mapping[str, str]) -> UserError:
    """Return the error of data of which no row has a column for the gold answer."""
    first, files = rows[0], list(dict.fromkeys(row.source for row in rows))
    who, shown = f"{first.origin} has no column", "it"
    if len(rows) > 1:
        who = f"none of the {len(rows)} rows of {list_some(files, _ROWS_SHOWN)} has a column"
        shown = "the first"
    missing: list[Role] = ["answer"]
    nor = ""
    if _column_name(first, "prompt", mapping) is None:
        missing, nor = ["prompt", "answer"], ", nor as the prompt"
    return UserError(
        f"{who} that is recognised as the gold answer (rewards compare completions with it){nor}; "
        f"{shown} has {_names(first)}. Set data.columns: {{{_guesses(first, missing)}}}, or "
        f"data.require_answer: false if no reward needs a gold answer.{_about_last_turn(first)}"
    )
