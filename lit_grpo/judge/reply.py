"""The form of a judge's reply, as a JSON schema, in words, and read back however it is wrapped.

What does not have the form is no verdict: nothing is guessed.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lit_grpo.judge.failures import JudgeFailure
from lit_grpo.types import Outcome, UserError

Verdict = Mapping[str, Any]
"""The fields of one item, checked."""

THOUGHTS = re.compile(r"\A\s*[^\s{\[].*</think(?:ing)?>", re.DOTALL | re.IGNORECASE)
"""Up to the last closing mark; a reply that begins as JSON may quote such a mark."""
SHOWN_CHARACTERS = 200


class Field(Protocol):
    """One field of a verdict."""

    @property
    def schema(self) -> Mapping[str, Any]: ...
    @property
    def words(self) -> str: ...
    def read(self, value: Any) -> Any:
        """The value, checked; raises ValueError."""


@dataclass(frozen=True)
class Text:
    """Any text."""

    words: str = '"one or two sentences"'
    schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "string"})

    def read(self, value: Any) -> str:
        if not isinstance(value, str):
            raise UserError("a text is expected")
        return value


@dataclass(frozen=True)
class Grade:
    """A whole number from 0 to ``highest``."""

    highest: int

    @property
    def schema(self) -> Mapping[str, Any]:
        # An enumeration: strict schemas know no minimum and maximum.
        return {"type": "integer", "enum": list(range(self.highest + 1))}

    @property
    def words(self) -> str:
        return f"a whole number from 0 to {self.highest}"

    def read(self, value: Any) -> int:
        number = None if isinstance(value, bool) else _as_number(value)
        if number is None or not 0 <= number <= self.highest or number != int(number):
            raise UserError(f"{self.words} is expected")
        return int(number)


@dataclass(frozen=True)
class YesNo:
    """True or false."""

    words: str = "true or false"
    schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "boolean"})

    def read(self, value: Any) -> bool:
        known = {"true": True, "false": False}
        if isinstance(value, str) and value.lower() in known:
            return known[value.lower()]
        if not isinstance(value, bool):
            raise UserError("true or false is expected")
        return value


@dataclass(frozen=True)
class Order:
    """Every one of the given ids once, the best first."""

    ids: tuple[str, ...]

    @property
    def schema(self) -> Mapping[str, Any]:
        # Without the ids: a server compiles each schema that it has not seen.
        return {"type": "array", "items": {"type": "string"}}

    @property
    def words(self) -> str:
        return "the list of all ids, the best first"

    def read(self, value: Any) -> tuple[str, ...]:
        if not isinstance(value, list) or Counter(map(str, value)) != Counter(self.ids):
            raise UserError(f"each of the ids {', '.join(self.ids)} once is expected")
        return tuple(map(str, value))


@dataclass(frozen=True)
class Form:
    """The fields that every verdict has, in the order in which the judge writes them."""

    fields: Mapping[str, Field]

    def schema(self, num_items: int) -> dict[str, Any]:
        """Strict: every field is required and no other is allowed. One item needs no id."""
        fields = {name: one.schema for name, one in self.fields.items()}
        if num_items == 1:
            return _object(fields)
        verdict = _object({"id": {"type": "string"}} | fields)
        return _object({"verdicts": {"type": "array", "items": verdict}})

    def words(self, num_items: int) -> str:
        """What a server without schemas has to be told."""
        fields = ", ".join(f'"{name}": {one.words}' for name, one in self.fields.items())
        if num_items == 1:
            return f"Reply with JSON alone: {{{fields}}}"
        verdicts = f'{{"verdicts": [{{"id": "the id", {fields}}}]}}'
        return f"Reply with JSON alone, one verdict for each id: {verdicts}"

    def read(self, verdict: Mapping[str, Any]) -> Verdict:
        """The fields of a verdict.

        Raises:
            JudgeFailure: a field that is missing or of the wrong kind.
        """
        read = {}
        for name, one in self.fields.items():
            try:
                read[name] = one.read(verdict[name])
            except KeyError:
                raise _unreadable(f"field {name!r} is missing", str(verdict)) from None
            except ValueError as error:
                raise _unreadable(f"field {name!r}: {error}", str(verdict)) from None
        return read


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(properties),
        "additionalProperties": False,
    }


def read_reply(text: str, form: Form, ids: Sequence[str]) -> dict[str, Verdict]:
    """The verdicts by id, of those ids that have exactly one.

    An id that was not asked for makes all of them doubtful: then there are none. Of several ids
    one whose fields cannot be read is left out, too.

    Raises:
        JudgeFailure: not JSON of this form, several replies that differ, or a single id without
            exactly one verdict that can be read.
    """
    listed = _listed_verdicts(text, form)
    if len(ids) == 1 and len(listed) == 1 and "id" not in listed[0]:
        listed = [{**listed[0], "id": ids[0]}]
    counts = Counter(str(one.get("id")) for one in listed)
    once = [one for one in listed if counts[str(one.get("id"))] == 1]
    if counts.keys() - set(ids):
        once = []
    if len(ids) == 1 and not once:
        raise _unreadable(f"exactly one verdict with the id {ids[0]} is expected", text)
    verdicts = {}
    for one in once:
        try:
            verdicts[str(one["id"])] = form.read(one)
        except JudgeFailure:
            if len(ids) == 1:
                raise
    return verdicts


def _listed_verdicts(text: str, form: Form) -> list[Mapping[str, Any]]:
    found = [one for value in _json_values(text) if (one := _as_list(value, form)) is not None]
    if not found:
        raise _unreadable("it holds no JSON of the form that was asked for", text)
    if any(one != found[0] for one in found[1:]):
        raise _unreadable("it holds several replies that differ", text)
    return found[0]


def _as_list(value: Any, form: Form) -> list[Mapping[str, Any]] | None:
    """A reply with its wrapping, without it, or a single verdict by itself."""
    if isinstance(value, dict) and "verdicts" in value:
        value = value["verdicts"]
    elif isinstance(value, dict) and form.fields.keys() <= value.keys():
        value = [value]
    is_reply = isinstance(value, list) and value and all(isinstance(one, dict) for one in value)
    return value if is_reply else None


def _json_values(text: str) -> Iterator[Any]:
    """Every outermost JSON object or list in a text, thoughts left out."""
    text = THOUGHTS.sub("", text)
    decoder, position = json.JSONDecoder(), 0
    while (start := _next_opening(text, position)) is not None:
        try:
            value, position = decoder.raw_decode(text, start)
        except RecursionError:
            return  # so deep that no verdict follows, and each further start would take as long
        except ValueError:
            position = start + 1
        else:
            yield value


def _next_opening(text: str, position: int) -> int | None:
    found = re.compile(r"[\[{]").search(text, position)
    return found.start() if found else None


def _as_number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _unreadable(why: str, text: str) -> JudgeFailure:
    shown = text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"
    return JudgeFailure(Outcome.PARSE_ERROR, f"{why}: {shown!r}", may_pass=True)
