"""Read numbers as people write them, exactly and without their units, and compare them.

A percent sign or words after a number are units, which are dropped: 25% is 25, not 0.25. A single
letter may be a unit or a variable, so it makes an amount, which equals only a bare number.
"""

from __future__ import annotations

import re
from fractions import Fraction

MAX_EXPONENT = 400
"""Larger powers of ten are left to the worker, since their digits could fill the memory here."""
MAX_NUMBER_CHARACTERS = 2000

_CURRENCY = r"(?:(?:US|CA|AU)?[$€£¥₹]|(?:USD|EUR|GBP|Rs\.?) ?)?"
_UNSIGNED = r"(?:(?:[1-9]\d{0,2}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
_SCALES = {"dozen": 12, "hundred": 10**2, "thousand": 10**3} | {
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
NUMBER = (
    rf"{_CURRENCY}(?P<sign>[-+]? ?){_CURRENCY}"
    r"(?:(?P<grouped>\d{1,3}(?:\.\d{3}){2,}|\d{1,3}(?: \d{3})+)(?![\d.,]*\d)"
    rf"|(?P<whole>\d+ (?=\d+ ?/ ?\d))?(?P<top>{_UNSIGNED})"
    r"(?:[eE](?P<exponent>[-+]?\d+)"
    r"|(?: ?\\(?:times|cdot) ?| ?[x*] ?)10 ?\^ ?\{?(?P<power>[-+]?\d+)\}?)?"
    rf"(?: ?/ ?(?P<bottom>-?{_UNSIGNED}))?)"
    rf"(?: (?P<scale>{'|'.join(_SCALES)})s?\b)?"
)
"""A number as people write it: sign, currency, thousands, mixed, fraction, scientific, scale."""
RATIO = r"\d+(?:(?::| : )\d+)+(?: ?[ap]\.?m\b\.?)?"
"""A ratio or a time of day, which is not a quotient."""

# These words join numbers, so they are not units.
_NO_UNIT = r"(?:or|and|to|plus|minus|times|over|mod|pi|sqrt|sin|cos|tan|log|ln|exp|through)\b"
_POWER = r"(?: ?\^ ?\{?-?\d\}?)?"
_ATTACHED = (
    r"(?:(?:[mck]m|[mk]g|m[lL]|lbs?|oz|ft|hrs?|mins?|secs?|mph|km/h|[A-Za-z]{4,})"
    rf"{_POWER}\b)?"
)
_PER = r"[mgJ](?=/(?:s|min|hr?|mol|kg|cm|m|mL|L|K)\b)"
"""A unit of one letter before a slash, as in ``m/s``, which is no quotient of variables."""
_WORD = (
    rf"(?!{_NO_UNIT})(?:an?(?= [A-Za-z]{{2}})|[A-Za-z][A-Za-z'’.-]++|{_PER})"
    rf"(?: ?/ ?[A-Za-z]++)?{_POWER}"
)
_TEXT = rf"\\text ?\{{[^{{}}0-9]*\}}{_POWER}"
_DEGREES = r" ?\^ ?\\circ(?: ?[CF]\b)?"
_SPACED = rf"(?: ?%|{_DEGREES}| ?/? ?{_TEXT}| {_WORD})"
# What a lookahead has matched is not tried in every split, which would take long for many words. A
# possessive repeat would say the same, but Python 3.11.2 ignores the lookahead within it.
_UNIT = rf"(?:[€£¥]|/[A-Za-z]+)?{_ATTACHED}(?=(?P<units>{_SPACED}*))(?P=units)"
_LETTER = rf"(?P<letter> [mglsh]{_POWER})?"
_NUMBER_WITH_UNIT = re.compile(rf"{NUMBER}(?:{_LETTER}|{_UNIT}) ?", re.IGNORECASE)
UNIT_AT_END = re.compile(rf"(?:(?<=[\w}})]){_SPACED})+$")
"""The unit after a formula."""
_TEXT_IN_NUMBER = re.compile(r"\\text ?\{([^{}]*)\}")
_FRACTION = re.compile(rf"\\frac ?\{{ ?(-?{_UNSIGNED}) ?\}} ?\{{ ?(-?{_UNSIGNED}) ?\}}")
_SPACES = re.compile(r" {2,}")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar) ?\{ ?(\d+) ?\}")
THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\d)")


def parse_number(text: str) -> tuple[Fraction, bool] | None:
    """Return the exact value of a cleaned text that is one number, and whether it has a letter."""
    if len(text) > MAX_NUMBER_CHARACTERS:
        return None
    text = _TEXT_IN_NUMBER.sub(_plain_text, text) if "\\text" in text else text
    match = _NUMBER_WITH_UNIT.fullmatch(with_plain_fractions(text))
    value = _value(match) if match else None
    return None if match is None or value is None else (value, match["letter"] is not None)


def with_plain_fractions(text: str) -> str:
    r"""Rewrite ``\frac{9}{7}`` as `` 9/7``, and so ``1\frac{3}{4}`` as ``1 3/4``."""
    if "\\" in text:
        text = _FRACTION.sub(r" \1/\2", _REPEATING.sub(_as_quotient, text))
    return _SPACES.sub(" ", text).strip()


def is_same_number(gold: Fraction, answer: Fraction) -> bool:
    """Compare numbers; a repeating fraction equals its decimals from six places on."""
    if gold == answer:
        return True
    return _is_terminating(gold) != _is_terminating(answer) and (
        abs(gold - answer) <= Fraction(1, 2 * 10**6) and abs(gold - answer) <= abs(gold) / 10**5
    )


def _plain_text(match: re.Match[str]) -> str:
    r"""Return what is in ``\text{}``, apart from a word if it continues no number."""
    content = match[1]
    is_letter = len(content.strip()) == 1 and content.strip().isalpha()
    return match[0] if is_letter else content if content[:1].isdigit() else f" {content.strip()}"


def _as_quotient(match: re.Match[str]) -> str:
    r"""Return ``0.1\overline{6}`` as a quotient: (16 - 1) / 90."""
    whole, start, period = match.groups()
    top = int(f"{whole}{start}{period}") - int(f"{whole}{start}" or 0)
    return f" {top}/{'9' * len(period)}{'0' * len(start)}"


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


def _is_terminating(number: Fraction) -> bool:
    """Return whether the decimals end: the denominator has no prime factors except 2 and 5."""
    rest = number.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1
