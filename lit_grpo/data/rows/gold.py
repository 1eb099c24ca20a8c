"""Read the gold answers of rows, and refuse data that have none where rewards need them.

An answer is not parsed here: what it means is up to the rewards.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from lit_grpo.data.rows.columns import (
    KNOWN_NAMES,
    ONE_VALUE,
    ROWS_SHOWN,
    Role,
    about_last_turn,
    column_name,
    find,
    guesses,
    is_null,
    list_columns,
    list_rows,
    missing_column,
    shown_value,
    to_text,
)
from lit_grpo.data.rows.filters import MISSING
from lit_grpo.data.rows.sources import Row
from lit_grpo.types import UserError
from lit_grpo.types.json_text import parse_json
from lit_grpo.types.settings import list_some

# GSM8K writes a solution and, on its last line, the gold answer: "#### 1,080"
_MARKED_GOLD = re.compile(r"^####[ \t]*(\S.*?)\s*\Z", re.MULTILINE)
_THOUSANDS_COMMA = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def gold_answers(
    rows: Sequence[Row], mapping: Mapping[str, str], *, required: bool
) -> list[str | None]:
    """Return the gold answer of each row, or None where it is null or missing and not required.

    If any answer of a file or dataset ends with GSM8K's mark, ``#### 1,080``, its gold answers are
    the text after the mark without thousands commas, here ``1080``, and an answer without the mark
    counts as null.
    An answer that is a list of texts or numbers becomes ``["1/2", "0.5"]``.

    Raises:
        UserError: a required answer is null, an answer is not a text, or no row has the column that
            the mapping names.
    """
    for row in rows:
        if fault := answer_fault(row, mapping):
            raise UserError(
                f"{row.origin}: {fault}. Name a column or a field of it by data.columns: {{answer: "
                "NAME.FIELD}, or write the answer as text (JSON, if a reward of yours reads that)."
            )
    values = [find(row, column_name(row, "answer", mapping)) for row in rows]
    if "answer" in mapping and all(value is MISSING for value in values):
        raise missing_column(rows[0], "answer", mapping)
    answers = [None if is_null(value) else to_text(value) for value in values]
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


def given_answer(row: Row, mapping: Mapping[str, str]) -> Any:
    """Return a gold answer that is not a string, unconverted; None for a string or null."""
    value = find(row, column_name(row, "answer", mapping))
    return None if is_null(value) or isinstance(value, str) else value


def answer_place(answer: str, columns: Mapping[str, Any]) -> str:
    """Return where a gold answer is in a row, ``column answer, after ####``; empty if unknown.

    The names of known layouts are looked at first, then the other columns.
    """
    row = Row(source="", number=1, id="", columns=columns)
    for name in (*KNOWN_NAMES["answer"], *columns):
        value = find(row, name)
        text = to_text(value) if isinstance(value, (*ONE_VALUE, list)) else ""
        if answer in (text, _after_mark(text)):
            return f"column {name}" + ("" if answer == text else ", after ####")
    return ""


def first_of(answer: Any) -> Any:
    """Return the first of a list of equal answers as text, and anything else as it is."""
    is_list = isinstance(answer, list) and all(isinstance(one, ONE_VALUE) for one in answer)
    return to_text(answer[0]) if answer and is_list else answer


def contradict(one: str, other: str) -> bool:
    """Return whether two gold answers, each a text or a list of equal ones, share none."""
    return one != other and _equal_answers(one).isdisjoint(_equal_answers(other))


def _equal_answers(answer: str) -> set[str]:
    with suppress(ValueError):
        value = parse_json(answer)
        if value and isinstance(value, list) and all(isinstance(one, str) for one in value):
            return set(value)
    return {answer}


def answer_fault(row: Row, mapping: Mapping[str, str]) -> str | None:
    """Return what is wrong with a gold answer that is neither text, a number nor a list of them."""
    name = column_name(row, "answer", mapping)
    value = find(row, name)
    items = value if isinstance(value, list) else [value]
    if is_null(value) or all(isinstance(one, ONE_VALUE) for one in items):
        return None
    return (
        f"the answer column {name!r} must hold text, a number or a list of these, got "
        f"{shown_value(value)}"
    )


def _after_mark(answer: str | None) -> str | None:
    match = _MARKED_GOLD.search(answer or "")
    return _THOUSANDS_COMMA.sub("", match[1]) if match else None


def _null_golds(rows: list[Row], num_rows: int, mapping: Mapping[str, str]) -> UserError:
    names = [column_name(row, "answer", mapping) for row in rows]
    if len(rows) == num_rows and not any(names):
        prompt = mapping.get("prompt")
        if prompt and all(find(row, prompt) is MISSING for row in rows):
            return missing_column(rows[0], "prompt", mapping)
        return _no_gold_column(rows, mapping)
    where = f"in {names[0]!r}" if names[0] else f"in any column ({list_columns(rows[0])})"
    column = guesses(rows[0], ["answer"])
    naming = "" if "answer" in mapping else f" name the column with data.columns: {{{column}}},"
    return UserError(
        f"{len(rows)} of {num_rows} rows have no gold answer {where}: {list_rows(rows)} (rewards "
        f"compare completions with it). Fill or remove them,{naming} or set data.require_answer: "
        f"false if no reward needs one.{about_last_turn(rows[0])}"
    )


def _no_gold_column(rows: list[Row], mapping: Mapping[str, str]) -> UserError:
    """Return the error of data of which no row has a column for the gold answer."""
    first, files = rows[0], list(dict.fromkeys(row.source for row in rows))
    who, shown = f"{first.origin} has no column", "it"
    if len(rows) > 1:
        who = f"none of the {len(rows)} rows of {list_some(files, ROWS_SHOWN)} has a column"
        shown = "the first"
    missing: list[Role] = ["answer"]
    nor = ""
    if column_name(first, "prompt", mapping) is None:
        missing, nor = ["prompt", "answer"], ", nor as the prompt"
    return UserError(
        f"{who} that is recognised as the gold answer (rewards compare completions with it, and "
        f"sft imitates it){nor}; {shown} has {list_columns(first)}. Set data.columns: "
        f"{{{guesses(first, missing)}}}, or data.require_answer: false if no reward needs a gold "
        "answer. For lit-grpo sft, model.target_column may name another column."
        f"{about_last_turn(first)}"
    )
