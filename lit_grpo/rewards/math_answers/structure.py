r"""Take answers apart: lists, tuples and sets, equations, and values with an approximation.

Only the text at the top level is looked at, outside of all brackets.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lit_grpo.rewards.math_answers.quantities import THOUSANDS

MAX_ITEMS = 50
MAX_DEPTH = 20
"""Deeper brackets are not an answer, and take very long to parse."""

_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)
_OPENING = {"(": 1, "[": 1, "{": 1, r"\{": 1, r"\begin": 1, r"\lfloor": 1, r"\lceil": 1}
_CLOSING = {")": 1, "]": 1, "}": 1, r"\}": 1, r"\end": 1, r"\rfloor": 1, r"\rceil": 1}
_CONJUNCTION = re.compile(
    r"(?:\\text ?\{ ?(?:,? ?and|,? ?or|,) ?\}|(?<=[\s\d}),])(?:and|or)(?=[\s\\\d(]))", re.IGNORECASE
)
_BRACKETED = re.compile(r"(\(|\[|\\\{)(.*)(\)|\]|\\\})", re.DOTALL)
_NAME = re.compile(
    r"(?:\\[a-zA-Z]+ ?)?(?:[A-Za-z]|\\[a-z]+|\\text ?\{[^{}]*\})'*"
    r"(?:_ ?(?:\w|\\?\{(?:[^{}]|\{[^{}]*\})*\}))?(?: ?\( ?[A-Za-z] ?\))?|[A-Za-z ]{3,}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """A list of answers.

    Its brackets are ``()``, ``[)``, ``{}`` and so on, or empty. The name belongs to the
    variable whose values they are, or is empty.
    """

    brackets: str
    texts: tuple[str, ...]
    name: str = ""


def depth_of(text: str) -> int:
    """Return how deep brackets are nested, whether they are closed or not."""
    depth = deepest = 0
    for match in _TOKEN.finditer(text):
        depth += (match[0] in _OPENING) - (match[0] in _CLOSING)
        deepest = max(deepest, abs(depth))
    return deepest


def items_of(text: str) -> Items:
    r"""Return the parts of a list; a text that is not a list is the only part.

    ``a \pm b`` are two parts. Equations for the same variable are its values.
    """
    brackets = ""
    match = _BRACKETED.fullmatch(text.strip())
    if match and "," in match[2] and depth_of_end(match[2]) is not None:
        brackets, text = match[1][-1] + match[3][-1], match[2]
        if re.search(r", |;", text):  # otherwise (1,234) is a point
            text = without_thousands(text)
    else:
        text = without_thousands(text)
    parts = [part for part in split(_CONJUNCTION.sub(",", text), {",", ";"}) if part]
    signed = [one for part in parts for one in _signs(part)]
    name = _variable_of(signed)
    texts = [sides_of(part)[-1] for part in signed] if name else signed
    return Items(brackets=brackets, texts=tuple(texts), name=name)


def without_thousands(text: str) -> str:
    return THOUSANDS.sub(lambda match: match[0].replace(",", ""), text) if "," in text else text


def sides_of(text: str) -> list[str]:
    """Return the parts of an equation, or of a chain of equations."""
    return split(text, {"="}) if "=" in text else [text]


def readings_of(text: str) -> list[str]:
    r"""Return both sides of ``\approx``."""
    return split(text, {r"\approx"}) if r"\approx" in text else [text]


def is_name(text: str) -> bool:
    """Return whether a text names a variable, such as ``x_1`` or ``f(x)``, or is a word."""
    return _NAME.fullmatch(text.strip()) is not None


def split(text: str, separators: set[str]) -> list[str]:
    """Split a text at separators outside of all brackets."""
    parts, start, depth, before = [], 0, 0, ""
    for match in _TOKEN.finditer(text):
        token = match[0]
        depth += (token in _OPENING) - (token in _CLOSING)
        if depth == 0 and token in separators and not (token == "=" and before in ("<", ">", "!")):
            parts.append(text[start : match.start()].strip())
            start = match.end()
        before = token
    return [*parts, text[start:].strip()]


def depth_of_end(text: str) -> int | None:
    """Return 0 if all brackets are closed, and none that was opened before the text."""
    depth = 0
    for match in _TOKEN.finditer(text):
        depth += (match[0] in _OPENING) - (match[0] in _CLOSING)
        if depth < 0:
            return None
    return 0 if depth == 0 else None


def _signs(part: str) -> list[str]:
    if part.count(r"\pm") != 1 or r"\mp" in part:
        return [part]
    plus = part.replace(r"\pm", "+").strip().removeprefix("+").strip()
    return [re.sub(r"= ?\+", "=", plus), part.replace(r"\pm", "-")]


def _variable_of(parts: list[str]) -> str:
    """Return the ``x`` of ``x = 1, x = 2`` and of ``x = 1, 2``; empty for anything else."""
    sides = [sides_of(part) for part in parts]
    names = {one[0] for one in sides if len(one) > 1}
    is_list = len(parts) > 1 and len(names) == 1 and len(sides[0]) > 1
    return names.pop() if is_list and is_name(sides[0][0]) else ""
