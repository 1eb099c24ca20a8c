"""Bring rows into the form of prepared data: columns by role, an id, and a hash of the prompt."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from lit_grpo.cli.prepare.recipe import RecipeSource, Role
from lit_grpo.data.rows.columns import id_fault, id_text, joined_parts
from lit_grpo.data.rows.filters import MISSING, find_value
from lit_grpo.data.rows.gold import first_of
from lit_grpo.data.rows.prepared import text_hash, text_hashes
from lit_grpo.data.rows.scored_answers import read_scored_answers
from lit_grpo.data.rows.sources import Row
from lit_grpo.types import UserError
from lit_grpo.types.json_text import parse_json

OWN = ("id", "source", "kind", "text_hash")
"""The columns that every prepared row has, whatever its source has under these names."""
ROLES: tuple[str, ...] = get_args(Role)
_CANONICAL = {*OWN, *ROLES, "messages", "gold_spread"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRow:
    """A row of a source in the form of prepared data."""

    origin: str
    """Where it comes from, for messages."""
    id: str
    """Empty until `with_ids`, if the source has none."""
    source: str
    kind: str
    text_hash: str
    columns: Mapping[str, Any]
    """All columns except `OWN`."""

    @property
    def text(self) -> str:
        """The words of the prompt."""
        messages = self.columns.get("messages")
        return _words(self.columns["prompt"] if messages is None else messages)

    @property
    def hashes(self) -> tuple[str, ...]:
        """The `text_hash` of the prompt, and of the question that it may wrap."""
        return self.text_hash, *text_hashes(self.columns.get("question"))

    def as_dict(self) -> dict[str, Any]:
        """Return the row as it is written."""
        return {name: getattr(self, name) for name in OWN} | dict(self.columns)

    def with_columns(self, **columns: Any) -> PreparedRow:
        return replace(self, columns={**self.columns, **columns})


class UnusableRow(Exception):
    """A row that cannot be used: a reason in few words, for a table, and what is wrong with it."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail or reason


def to_prepared(row: Row, answer: str | None, name: str, source: RecipeSource) -> PreparedRow:
    """Return a row of a source as a prepared one.

    Args:
        row: The row.
        answer: Its gold answer, if it has one.
        name: Name of the source.
        source: Which columns have which roles.

    Raises:
        UnusableRow: it has no prompt, an id that is not a text, or answers or scores that cannot be
            compared.
    """
    roles = {role: source.columns.get(role, role) for role in ROLES}
    if "prompt" not in source.columns:
        known = (one for one in prompt_columns(source) if _value(row.columns, one) is not None)
        roles["prompt"] = next(known, roles["prompt"])
    values = {role: _value(row.columns, column) for role, column in roles.items()}
    prompt = _prompt(values.pop("prompt"), roles["prompt"])
    given = _id(values.pop("id"), row)
    if not given and "id" in source.columns:
        raise UnusableRow("no id", f"the column {roles['id']!r} is null, empty or missing")
    columns = {role: value for role, value in values.items() if value is not None}
    columns |= {"messages" if isinstance(prompt, list) else "prompt": prompt}
    if "completion" in columns:
        columns["completion"] = first_of(columns["completion"])
    columns.pop("answer", None)
    if answer is not None:
        columns["answer"] = answer
    if isinstance(columns.get("question"), list) and _joined(columns["question"]) == prompt:
        del columns["question"]  # they are messages
    if source.kind == "open":  # templates of rubrics name it
        columns.setdefault("question", _words(prompt))
    return PreparedRow(
        origin=row.origin,
        id=given,
        source=name,
        kind=source.kind,
        text_hash=text_hash(prompt),
        columns=_others(row, set(roles.values())) | _with_lists(columns),
    )


def prompt_columns(source: RecipeSource) -> list[str]:
    """Return the columns of which a row needs one, by preference."""
    if "prompt" in source.columns:
        return [source.columns["prompt"]]
    return ["prompt", source.columns.get("question", "question"), "messages"]


def from_prepared(row: Row) -> PreparedRow:
    """Return a row that prepared data have."""
    columns = {name: value for name, value in row.columns.items() if value is not None}
    own = {name: columns.pop(name) for name in OWN}
    return PreparedRow(origin=row.origin, columns=columns, **own)


def with_ids(rows: Sequence[PreparedRow], sources: Mapping[str, RecipeSource]) -> list[PreparedRow]:
    """Return the rows of a source with an id each, which does not depend on their order.

    A row without an id gets the prompt's; copies of a prompt are numbered.

    Args:
        rows: The rows.
        sources: The source by its name, for messages.

    Raises:
        UserError: two rows have the same id.
    """
    derived = [row for row in rows if not row.id]
    copies: dict[str, int] = {}
    ids: dict[int, str] = {}
    for row in sorted(derived, key=lambda one: (one.text_hash, _content_hash(one))):
        number = copies[row.text_hash] = copies.get(row.text_hash, 0) + 1
        ids[id(row)] = f"{row.source}:{row.text_hash[:16]}" + (f"-{number}" if number > 1 else "")
    named = [replace(row, id=ids.get(id(row), row.id)) for row in rows]
    check_ids(named, sources)
    return named


def check_ids(rows: Iterable[PreparedRow], sources: Mapping[str, RecipeSource]) -> None:
    """Raise UserError if two rows have the same id."""
    first: dict[str, str] = {}
    repeated: list[PreparedRow] = []
    for row in rows:
        if row.id in first:
            repeated.append(row)
        first.setdefault(row.id, row.origin)
    if repeated:
        row = repeated[0]
        raise UserError(
            f"ids must be unique, got {len(repeated)} rows whose id another row has: {row.id!r} is "
            f"that of {first[row.id]} and of {row.origin} (the holdout is known by its ids). Make "
            f"them unique, or {_other_ids(row.source, sources[row.source])}."
        )


def _other_ids(name: str, source: RecipeSource) -> str:
    """Return how a source's rows get other ids; a column called id needs no mapping."""
    if source.columns.get("id", "id") != "id":
        return f"leave the id out of sources.{name}.columns (ids are made of the prompts then)"
    return (
        "rename the column id in the file (ids are made of the prompts then), or take another one "
        f"by sources.{name}.columns: {{id: NAME}}"
    )


def _id(value: Any, row: Row) -> str:
    """Return an id as text, empty if there is none.

    Raises:
        UnusableRow: it is neither text nor a number.
    """
    if value is None or (isinstance(value, str) and not value.strip()):
        return ""
    if fault := id_fault(value):
        raise UnusableRow("unusable id", fault)
    return id_text(value, row)


def _value(columns: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column, None if there is none or if it is NaN, pandas's null."""
    value = find_value(columns, name)
    is_nan = isinstance(value, float) and value != value
    return None if value is MISSING or is_nan else value


def _prompt(value: Any, column: str) -> str | list[dict[str, Any]]:
    if value is None or value == [] or (isinstance(value, str) and not value.strip()):
        raise UnusableRow("no prompt", f"the prompt column {column!r} is empty or missing")
    if isinstance(value, str):
        return value
    what = f"the prompt column {column!r} holds neither text nor messages but {str(value)[:60]!r}"
    if isinstance(value, list) and all(isinstance(one, dict) and "role" in one for one in value):
        turns = _joined(value)
        if all(isinstance(one.get("content"), str | None) for one in turns):
            return turns
        what = f"a message of the prompt column {column!r} has other contents than text"
    raise UnusableRow("prompt is no text", what)


def _joined(turns: Sequence[Any]) -> list[Any]:
    """Return messages whose contents are text instead of parts of it."""
    return [
        one | {"content": joined_parts(one["content"])}
        if isinstance(one, dict) and "content" in one
        else one
        for one in turns
    ]


def _words(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a prompt, or of all messages of a conversation."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(one["content"] for one in prompt if one.get("content"))


def _with_lists(columns: dict[str, Any]) -> dict[str, Any]:
    """Return the columns with answers and scores as lists.

    Raises:
        UnusableRow: they cannot be read.
    """
    if columns.get("gold_scores") is not None:
        try:
            scored = read_scored_answers(columns, "answers", "gold_scores")
        except UserError as error:
            raise UnusableRow("unusable scores", str(error)) from error
        return columns | {"answers": [*scored.answers], "gold_scores": [*scored.gold_scores]}
    if columns.get("answers") is not None:
        columns |= {"answers": _texts(columns["answers"])}
    return columns


def _texts(value: Any) -> list[str]:
    try:
        texts = parse_json(value) if isinstance(value, str) else value
    except ValueError:
        texts = None
    if isinstance(texts, list) and all(isinstance(one, str) for one in texts):
        return texts
    raise UnusableRow(
        "unusable answers", f"the answers are no list of strings: {str(value)[:60]!r}"
    )


def _others(row: Row, used: set[str]) -> dict[str, Any]:
    """Return the columns of no role; one called like a column of prepared data is renamed.

    The columns that `prepare` adds to a row are left out, since they are added again.
    """
    is_prepared = all(name in row.columns for name in OWN)
    found: dict[str, Any] = {}
    for name, value in row.columns.items():
        if name in used or (is_prepared and name in _CANONICAL - {"gold_spread"}):
            continue
        is_taken = name in _CANONICAL and not (is_prepared and name == "gold_spread")
        found[f"original_{name}" if is_taken else name] = value
    return {name: value for name, value in found.items() if value is not None}


def _content_hash(row: PreparedRow) -> str:
    text = json.dumps(row.columns, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
