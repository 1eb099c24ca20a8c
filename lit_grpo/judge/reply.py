"""The form of a judge's reply: its JSON schema, its description in words, and its parser.

The parser accepts prose, fences and reasoning around the JSON. A reply in any other form fails; the
parser never guesses a value.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from lit_grpo.judge.failures import JudgeFailure
from lit_grpo.types import Outcome

Verdict = Mapping[str, Any]
"""The checked fields of one item."""

REASONING = re.compile(r"\A\s*[^\s{\[].*</think(?:ing)?>", re.DOTALL | re.IGNORECASE)
"""Everything up to the last closing tag, unless the reply begins as JSON, which may quote one."""
SHOWN_CHARACTERS = 200


class Field(Protocol):
    """One field of a verdict."""

    @property
    def schema(self) -> Mapping[str, Any]:
        """JSON schema of the value."""

    @property
    def description(self) -> str:
        """Requirements for the value, in the words of the prompt."""

    def read(self, value: Any) -> Any:
        """Return the checked value; raise ValueError if it does not fit."""


@dataclass(frozen=True)
class Text:
    """Any text."""

    description: str = '"one or two sentences"'
    schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "string"})

    def read(self, value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError("expected a string")
        return value


@dataclass(frozen=True)
class Grade:
    """A whole number from 0 to ``highest``."""

    highest: int

    @property
    def schema(self) -> Mapping[str, Any]:
        # An enumeration, since strict schemas have no minimum and maximum.
        return {"type": "integer", "enum": list(range(self.highest + 1))}

    @property
    def description(self) -> str:
        return f"a whole number from 0 to {self.highest}"

    def read(self, value: Any) -> int:
        number = None if isinstance(value, bool) else _as_number(value)
        if number is None or not 0 <= number <= self.highest or number != int(number):
            raise ValueError(f"expected {self.description}")
        return int(number)


@dataclass(frozen=True)
class YesNo:
    """True or false."""

    description: str = "true or false"
    schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "boolean"})

    def read(self, value: Any) -> bool:
        known = {"true": True, "false": False}
        if isinstance(value, str) and value.lower() in known:
            return known[value.lower()]
        if not isinstance(value, bool):
            raise ValueError("expected true or false")
        return value


@dataclass(frozen=True)
class Order:
    """A list with each of the given ids once, the best first."""

    ids: tuple[str, ...]

    @property
    def schema(self) -> Mapping[str, Any]:
        # Without the ids, since a server compiles each new schema.
        return {"type": "array", "items": {"type": "string"}}

    @property
    def description(self) -> str:
        return "the list of all ids, the best first"

    def read(self, value: Any) -> tuple[str, ...]:
        if not isinstance(value, list) or Counter(map(str, value)) != Counter(self.ids):
            raise ValueError(f"expected each of the ids {', '.join(self.ids)} exactly once")
        return tuple(map(str, value))


@dataclass(frozen=True)
class Form:
    """The fields of every verdict, in the order in which the judge writes them."""

    fields: Mapping[str, Field]

    def schema(self, num_items: int) -> dict[str, Any]:
        """Return the strict JSON schema of a reply; a single item has no id.

        All fields are required and no others are allowed.
        """
        fields = {name: one.schema for name, one in self.fields.items()}
        if num_items == 1:
            return _object(fields)
        verdict = _object({"id": {"type": "string"}} | fields)
        return _object({"verdicts": {"type": "array", "items": verdict}})

    def instructions(self, num_items: int) -> str:
        """Return the description of a reply for the prompt."""
        fields = ", ".join(f'"{name}": {one.description}' for name, one in self.fields.items())
        if num_items == 1:
            return f"Reply with JSON only: {{{fields}}}"
        verdicts = f'{{"verdicts": [{{"id": "the id", {fields}}}]}}'
        return f"Reply with JSON only, one verdict for each id: {verdicts}"

    def read(self, verdict: Mapping[str, Any]) -> Verdict:
        """Return the checked fields of a verdict.

        Raises:
            JudgeFailure: a field is missing or does not fit.
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
    """Return id -> verdict for the ids with exactly one readable verdict.

    A reply with an unknown id yields no verdicts at all, since its ids cannot be trusted.

    Raises:
        JudgeFailure: the text has no JSON of this form, or several different replies; or a single
            id was asked for and has no readable verdict.
    """
    listed = _list_verdicts(text, form)
    if len(ids) == 1:
        return {ids[0]: _read_only_verdict(listed, form, ids[0], text)}
    counts = Counter(str(one.get("id")) for one in listed)
    if counts.keys() - set(ids):
        return {}
    verdicts = {}
    for one in listed:
        if counts[str(one["id"])] == 1:
            with suppress(JudgeFailure):
                verdicts[str(one["id"])] = form.read(_without_id(one))
    return verdicts


def _read_only_verdict(
    listed: Sequence[Mapping[str, Any]], form: Form, item: str, text: str
) -> Verdict:
    """Return the verdict of the one id that was asked for; the reply may leave the id out.

    Raises:
        JudgeFailure: there are several verdicts, or it is one on another id, or not readable.
    """
    if len(listed) != 1 or str(listed[0].get("id", item)) != item:
        raise _unreadable(f"expected exactly one verdict with the id {item}", text)
    return form.read(_without_id(listed[0]))


def _without_id(verdict: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in verdict.items() if name != "id"}


def _list_verdicts(text: str, form: Form) -> list[Mapping[str, Any]]:
    found = [one for value in _json_values(text) if (one := _as_list(value, form)) is not None]
    if not found:
        fields = ", ".join(map(repr, form.fields))
        raise _unreadable(f"the reply has no JSON object with {fields}", text)
    if any(one != found[0] for one in found[1:]):
        raise _unreadable("the reply holds several different verdicts", text)
    return found[0]


def _as_list(value: Any, form: Form) -> list[Mapping[str, Any]] | None:
    """Return the verdicts of a wrapped reply, of a bare list or of a single verdict, else None."""
    if isinstance(value, dict) and "verdicts" in value:
        value = value["verdicts"]
    elif isinstance(value, dict) and form.fields.keys() <= value.keys():
        value = [value]
    is_reply = isinstance(value, list) and value and all(isinstance(one, dict) for one in value)
    return value if is_reply else None


def _json_values(text: str) -> Iterator[Any]:
    """Yield the outermost JSON objects and lists of a text, without those in its reasoning.

    Raises:
        JudgeFailure: an object has two values for one key, neither of which can be trusted.
    """
    text = REASONING.sub("", text)

    def read(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if any(values[key] != value for key, value in pairs):
            raise _unreadable("a key has several different values", text)
        return values

    decoder, position = json.JSONDecoder(object_pairs_hook=read), 0
    while (start := _next_opening(text, position)) is not None:
        try:
            value, position = decoder.raw_decode(text, start)
        except RecursionError:
            return  # too deep for a verdict, and each further start would take as long
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
    return JudgeFailure(Outcome.PARSE_ERROR, f"{why}: {shown!r}", is_transient=True)
