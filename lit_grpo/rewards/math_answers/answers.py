"""Parse final answers, and compare those that need no computer algebra.

Numbers are compared as fractions, never as floats. A percent sign or words after a number are
units, which are dropped: 25% is 25, not 0.25.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

MAX_EXPONENT = 400
"""Larger powers of ten are left to the worker, since their digits could fill the memory here."""
MAX_NUMBER_CHARACTERS = 2000
MAX_WORDS = 3
"""An answer with more words is a sentence, which cannot be compared."""

_CHARACTERS = str.maketrans(
    dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d", "-")
    | dict.fromkeys("\u00a0\u2007\u2009\u202f\t\r\n", " ")
    | {"\u200b": "", "％": "%", "⁄": "/", "∕": "/", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot "}
    | {"π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup "}
    | {"∈": r"\in ", "∅": r"\emptyset ", "√": r"\sqrt ", "°": r"^\circ", "²": "^2", "³": "^3"}
    | {"½": " 1/2", "¼": " 1/4", "¾": " 3/4", "⅓": " 1/3", "⅔": " 2/3"}
)
_REWRITES = [
    (re.compile(pattern), new)
    for pattern, new in [
        (r"(?<!\\)\\(?:(?:left|right|displaystyle)(?![A-Za-z])|[!,])", ""),
        (r"(?<!\\)\\(?:[;: ]|quad(?![A-Za-z]))|~", " "),
        (r"\{,\}", ","),
        (r"(?<!\\)\\([$%])", r"\1"),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"(?<=\w)\*\*(?=\w)", "^"),
        (r"\s+", " "),
    ]
]
_WRAPPERS = [
    re.compile(pattern)
    for pattern in [
        r"\$\$?([^$]+)\$\$?",
        r"\\\((.+)\\\)",
        r"\\\[(.+)\\\]",
        r"\\(?:boxed|text|textbf|textit|mathbf|mathrm|mbox|textrm) ?\{([^{}]*)\}",
        r"[*_`\"']{1,3}(.+?)[*_`\"']{1,3}",
        r"\(([A-Za-z])\)",
    ]
]

_CURRENCY = r"(?:(?:US|CA|AU)?[$€£¥₹]|(?:USD|EUR|GBP|Rs\.?) ?)?"
_UNSIGNED = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9}
NUMBER = (
    rf"{_CURRENCY}(?P<sign>[-+]? ?){_CURRENCY}"
    r"(?:(?P<grouped>\d{1,3}(?:\.\d{3}){2,}|\d{1,3}(?: \d{3})+)(?![\d.,]*\d)"
    rf"|(?P<whole>\d+ (?=\d+ ?/ ?\d))?(?P<top>{_UNSIGNED})"
    r"(?:[eE](?P<exponent>[-+]?\d+)"
    r"|(?: ?\\(?:times|cdot) ?| ?[x*] ?)10 ?\^ ?\{?(?P<power>[-+]?\d+)\}?)?"
    rf"(?: ?/ ?(?P<bottom>-?{_UNSIGNED}))?)"
    rf"(?: (?P<scale>{'|'.join(_SCALES)})\b)?"
)
"""A number as people write it: sign, currency, thousands, mixed, fraction, scientific, scale."""
RATIO = r"\d+(?: ?: ?\d+)+(?: ?[ap]\.?m\b\.?)?"
"""A ratio or a time of day, which is not a quotient."""

# A single letter may be a variable, and these words join numbers, so neither is a unit.
_NO_UNIT = r"(?:or|and|to|plus|minus|times|over|mod|pi|sqrt|sin|cos|tan|log|ln|exp|through)\b"
_POWER = r"(?:\^\{?\d\}?)?"
_ATTACHED = rf"(?:(?:[mck]?m|[mk]?g|[mk]?l|lbs?|oz|ft|hrs?|mins?|mph|km/h|s|h){_POWER}\b)?"
_WORD = rf"(?!{_NO_UNIT})(?:[mgl]\b|[A-Za-z][A-Za-z'’.-]++)(?:/[A-Za-z]++)?{_POWER}"
_TEXT = rf"\\(?:text|mathrm|mbox|textrm) ?\{{[^{{}}]*\}}{_POWER}"
# Possessive, so that a long run of words is not tried in every split.
_UNIT = rf"{_ATTACHED}(?: ?%| ?\^ ?\{{?\\circ\}}?| ?{_TEXT}| {_WORD})*+"
_PLAIN = re.compile(r"\s*(-?[0-9]{1,18})\.?\s*")
_NUMBER_WITH_UNIT = re.compile(rf"{NUMBER}{_UNIT} ?", re.IGNORECASE)
_RATIO = re.compile(RATIO, re.IGNORECASE)
_WORDS = re.compile(r"[A-Za-z][A-Za-z'’ -]{2,}")
_FRACTION = re.compile(
    rf"\\frac ?(?:\{{ ?(-?{_UNSIGNED}) ?\}} ?\{{ ?(-?{_UNSIGNED}) ?\}}|(\d)(\d))"
)
_BARE_WORD = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{2,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A final answer: its cleaned text, and its exact value if it is a number."""

    text: str
    kind: Literal["number", "ratio", "words", "expression"]
    number: Fraction | None = None

    @property
    def is_sentence(self) -> bool:
        return self.number is None and len(_BARE_WORD.findall(self.text)) > MAX_WORDS


def parse_answer(text: str) -> Answer | None:
    """Parse a text that is an answer, without its markup; None if nothing is left."""
    if plain := _PLAIN.fullmatch(text):
        return Answer(text=plain[1], kind="number", number=Fraction(plain[1]))
    text = clean(text)
    if not text:
        return None
    number = parse_number(text)
    if number is not None:
        return Answer(text=text, kind="number", number=number)
    if _RATIO.fullmatch(text):
        bare = text.replace(" ", "").replace(".", "").lower()
        return Answer(text=bare, kind="ratio")
    if _WORDS.fullmatch(text):
        return Answer(text=text.casefold(), kind="words")
    return Answer(text=text, kind="expression")


def compare(gold: Answer, answer: Answer) -> bool | None:
    """Return whether two answers are the same, or None if that needs computer algebra."""
    if gold.number is not None and answer.number is not None:
        return _same_number(gold.number, answer.number)
    if gold.kind == answer.kind and gold.text.replace(" ", "") == answer.text.replace(" ", ""):
        return True
    if "expression" not in (gold.kind, answer.kind) or "words" in (gold.kind, answer.kind):
        return False
    return None


def clean(text: str) -> str:
    """Normalise characters, and remove markup and punctuation around the whole text."""
    text = text.translate(_CHARACTERS)
    for pattern, new in _REWRITES:
        text = pattern.sub(new, text)
    before = None
    while text != before:
        before = text
        text = text.strip().rstrip(".,;:*").lstrip(":=*").strip()
        for wrapper in _WRAPPERS:
            if match := wrapper.fullmatch(text):
                text = match[1]
    return text


def with_plain_fractions(text: str) -> str:
    r"""Rewrite ``\frac{9}{7}`` as `` 9/7``, and so ``1\frac{3}{4}`` as ``1 3/4``."""
    return _FRACTION.sub(lambda m: f" {m[1] or m[3]}/{m[2] or m[4]}", text)


def parse_number(text: str) -> Fraction | None:
    """Return the exact value of a cleaned text that is one number, with or without a unit."""
    if len(text) > MAX_NUMBER_CHARACTERS:
        return None
    match = _NUMBER_WITH_UNIT.fullmatch(with_plain_fractions(text).strip())
    return _value(match) if match else None


def _value(match: re.Match[str]) -> Fraction | None:
    if match["grouped"]:
        value = Fraction(re.sub(r"[ .]", "", match["grouped"]))
    else:
        exponent = int(match["exponent"] or match["power"] or 0)
        bottom = Fraction((match["bottom"] or "1").replace(",", ""))
        if abs(exponent) > MAX_EXPONENT or bottom == 0:
            return None
        top = Fraction(match["top"].replace(",", "")) * Fraction(10) ** exponent
        value = int(match["whole"] or 0) + top / bottom
    if match["scale"]:
        value *= _SCALES[match["scale"].lower()]
    return -value if match["sign"].strip() == "-" else value


def _same_number(gold: Fraction, answer: Fraction) -> bool:
    """Compare numbers; a repeating fraction equals its decimals from six places on."""
    if gold == answer:
        return True
    return _is_terminating(gold) != _is_terminating(answer) and (
        abs(gold - answer) <= Fraction(1, 2 * 10**6) and abs(gold - answer) <= abs(gold) / 10**5
    )


def _is_terminating(number: Fraction) -> bool:
    """Return whether the decimals end: the denominator has no prime factors but 2 and 5."""
    rest = number.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1
