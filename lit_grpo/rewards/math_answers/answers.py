"""Parse final answers, and compare those that need no computer algebra."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from lit_grpo.rewards.math_answers.notation import clean
from lit_grpo.rewards.math_answers.quantities import (
    RATIO,
    UNIT_AT_END,
    is_same_number,
    parse_number,
)
from lit_grpo.rewards.math_answers.structure import MAX_DEPTH, depth_of, items_of

MAX_PARSED_CHARACTERS = 6000
"""A longer text is not an answer."""
MAX_CHARACTERS_WITH_UNIT = 500
MAX_EXTRA_CHARACTERS = 1000
"""Characters by which a right answer may be longer than the gold answer."""
MAX_WORDS = 3
"""An answer with more words is a sentence, which cannot be compared."""
_PLAIN = re.compile(
    r"\s*(?P<currency>\$?)(?P<number>-?(?:[0-9]{1,18}|[1-9][0-9]{0,2}(?:,[0-9]{3}){1,5})"
    r"(?:\.[0-9]{1,18})?)\.?\s*"
)
"""Most answers, which need no cleaning."""
_RATIO = re.compile(RATIO, re.IGNORECASE)
_WORDS = re.compile(r"[A-Za-z][A-Za-z'’ -]{2,}|[A-Z][a-z]|no|on|or|if|in|is|it|as|at|up|to|so|by")
_LONG_WORD = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{4,}(?![A-Za-z])")
_BASE = re.compile(r"(?P<digits>[0-9A-F]+) ?_ ?\{? ?(?P<base>\d+) ?\}?")
_BARE_WORD = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{2,}")
_NUMERIC = re.compile(r"[\d\\]")
_TEXT = re.compile(r"\\text ?\{([^{}]*)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A final answer: its cleaned text, and its exact value if it is a number.

    Words are compared as texts, expressions by computer algebra. ``amount`` is the value of a
    number with a letter, such as ``5 m``, if that is a unit and not a variable.
    """

    text: str
    kind: Literal["number", "ratio", "base", "words", "expression"]
    number: Fraction | None = None
    amount: Fraction | None = None

    @property
    def is_sentence(self) -> bool:
        return self.number is None and len(_BARE_WORD.findall(self.text)) > MAX_WORDS


def parse_answer(text: str) -> Answer | None:
    """Parse a text that is an answer, without its markup; None if nothing is left or too much."""
    if len(text) > MAX_PARSED_CHARACTERS:
        return None
    if plain := _PLAIN.fullmatch(text):
        number = Fraction(plain["number"].replace(",", ""))
        return Answer(text=plain["currency"] + plain["number"], kind="number", number=number)
    text = clean(text)
    if not any(map(str.isalnum, text)):
        return None
    if found := parse_number(text):
        value, has_letter = found
        if has_letter:
            return Answer(text=text, kind="expression", amount=value)
        return Answer(text=text, kind="number", number=value)
    return _parse_text(text)


def _parse_text(text: str) -> Answer:
    """Parse a cleaned text that is not a number."""
    if _RATIO.fullmatch(text):
        return Answer(text=text.replace(" ", "").replace(".", "").lower(), kind="ratio")
    if base := _BASE.fullmatch(text):
        return Answer(text=f"{base['digits']}_{base['base']}", kind="base")
    if _WORDS.fullmatch(text):
        return Answer(text=text.casefold(), kind="words")
    bare = UNIT_AT_END.sub("", text).strip() if len(text) <= MAX_CHARACTERS_WITH_UNIT else ""
    if _NUMERIC.search(bare) and not _LONG_WORD.search(bare):
        text = bare
    if _LONG_WORD.search(text) and not all(map(parse_number, items_of(text).texts)):
        return Answer(text=_TEXT.sub(r"\1", text).casefold(), kind="words")
    return Answer(text=text, kind="expression")


def compare(gold: Answer, answer: Answer) -> bool | None:
    """Return whether two answers are the same, or None if that needs computer algebra."""
    if gold.number is not None and answer.number is not None:
        return is_same_number(gold.number, answer.number)
    if gold.number is not None and answer.amount is not None:
        return is_same_number(gold.number, answer.amount)
    if gold.kind == "base" and answer.kind == "number":
        return answer.text == gold.text.partition("_")[0]  # the question says the base
    if gold.kind == answer.kind and gold.text.replace(" ", "") == answer.text.replace(" ", ""):
        return True
    kinds = (gold.kind, answer.kind)
    if "expression" not in kinds or "words" in kinds or "base" in kinds or "ratio" in kinds:
        return False
    is_too_long = len(answer.text) > MAX_EXTRA_CHARACTERS + len(gold.text)
    return False if is_too_long or depth_of(answer.text) > MAX_DEPTH else None
