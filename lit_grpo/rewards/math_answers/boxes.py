r"""Find the answer in ``\boxed{}``: the last box, with the boxes that form a list with it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lit_grpo.rewards.math_answers.answers import Answer, parse_answer

MAX_BOXES = 20
MAX_CONNECTION = 80
"""Characters between two boxes of a list."""
_BRACE = re.compile(
    r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\(?:boxed|fbox)\s+(?P<bare>[^\s{}$\\]+)|\\.|[{}]"
)
_CONTENT = re.compile(r"\S")
_VARIABLE = r"[A-Za-z](?:_\{?\w+\}?)?"
_NAME = re.compile(rf"({_VARIABLE})\s*&?\s*=\s*$")
_FILLING = r"(?:[\s$.&]|\\[\[\]()\\]|\\q?quad)*"
_CONNECTION = re.compile(
    rf"{_FILLING}(?P<word>(?:,|;|\b(?:and|or)\b|\\text ?\{{ ?(?:and|or) ?\}}){_FILLING}){{0,2}}"
    rf"(?P<name>{_VARIABLE}\s*&?\s*=\s*)?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Box:
    """Where a box and its content start and end."""

    start: int
    inside: int
    inside_end: int
    end: int


def boxed_answer(text: str) -> Answer | None:
    """Return the answer in the last box, or the list that it is part of."""
    boxes = _boxes(text)
    if not boxes:
        return None
    together = [boxes[-1]]
    for box in reversed(boxes[-MAX_BOXES:-1]):
        if not _is_connection(text[box.end : together[0].start]):
            break
        together.insert(0, box)
    contents = [text[box.inside : box.inside_end] for box in together]
    if len(set(contents)) == 1:
        return parse_answer(contents[0])
    matches = [_NAME.search(text[max(0, box.start - 20) : box.start]) for box in together]
    names = [match[1] for match in matches if match]
    if len(set(names)) == len(contents):
        contents = [f"{name}={one}" for name, one in zip(names, contents, strict=True)]
    return parse_answer(", ".join(contents))


def _boxes(text: str) -> list[_Box]:
    """Return the complete boxes with content, without those inside another."""
    found: list[_Box] = []
    opened: list[tuple[re.Match[str], bool]] = []
    for match in _BRACE.finditer(text):
        if match["bare"]:
            inside, end = match.span("bare")
            found.append(_Box(start=match.start(), inside=inside, inside_end=end, end=end))
        elif match["box"] or match[0] == "{":
            opened.append((match, match["box"] is not None))
        elif match[0] == "}" and opened:
            opening, is_box = opened.pop()
            start, inside, end = opening.start(), opening.end(), match.start()
            if is_box and _CONTENT.search(text, inside, end):
                while found and found[-1].start > start:
                    found.pop()
                found.append(_Box(start=start, inside=inside, inside_end=end, end=match.end()))
    return found


def _is_connection(between: str) -> bool:
    """Return whether two boxes are parts of one answer: joined by "and", a comma or ``y =``."""
    match = _CONNECTION.fullmatch(between) if len(between) <= MAX_CONNECTION else None
    return match is not None and (match["word"] or match["name"]) is not None
