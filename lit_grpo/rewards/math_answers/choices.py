"""Read the letter of a multiple-choice answer, such as "(B) Paris" or "option B"."""

from __future__ import annotations

import re

_LETTER = re.compile(r"[(\[]?([A-J])[)\].]?")
_WORDS_BEFORE = r"(?:the\s+)?(?:correct\s+)?(?:option|choice|letter|answer)\s+(?:is\s+)?"
_CHOICE = re.compile(
    rf"\s*(?i:{_WORDS_BEFORE})?(?:[(\[]([A-J])[)\]]|([A-J])(?=\s*$|[).:]|\s+[-–—]\s))(?P<rest>.*)",
)
_OTHER_CHOICE = re.compile(r"(?<!\w)[(\[]?[A-J][)\]:]|\b(?:or|and)\s+[A-J]\b")
_EMPHASIS = re.compile(r"[*_`\"']+")


def choice_of(gold: str) -> str | None:
    """Return the letter, A to J, of a gold answer that names a choice, as in "(B)" or "B."."""
    found = _LETTER.fullmatch(gold.strip())
    return found and found[1]


def choice_in(line: str) -> str | None:
    """Return the letter of the choice that a line starts with, if it names no other choice."""
    found = _CHOICE.fullmatch(_EMPHASIS.sub("", line))
    if found is None or _OTHER_CHOICE.search(found["rest"]):
        return None
    return found[1] or found[2]
