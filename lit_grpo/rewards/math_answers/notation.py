r"""Convert the notations of an answer to one: plain LaTeX without markup around it.

Characters, spaces, font commands and synonyms are rewritten, and what surrounds the whole answer,
such as ``$…$``, ``**…**`` or ``\boxed{}``, is removed.
"""

from __future__ import annotations

import re

_CHARACTERS = str.maketrans(
    dict.fromkeys("\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d", "-")
    | dict.fromkeys("\u00a0\u2007\u2009\u202f\t\r", " ")
    | {"\u200b": "", "％": "%", "⁄": "/", "∕": "/", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot "}
    | {"π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup "}
    | {"∈": r"\in ", "∅": r"\emptyset ", "√": r"\sqrt ", "°": r"^\circ", "²": "^2", "³": "^3"}
    | {"½": " 1/2", "¼": " 1/4", "¾": " 3/4", "⅓": " 1/3", "⅔": " 2/3", "≈": r"\approx "}
    | {"±": r"\pm ", "÷": "/", "“": '"', "”": '"', "θ": r"\theta ", "∩": r"\cap "}
)
_FUNCTIONS = (
    "sin|cos|tan|cot|csc|arcsin|arccos|arctan|sinh|cosh|tanh|ln|log|exp|sqrt|pi|theta|infty"
)
_FONTS = "boldsymbol|mathbf|mathit|mathsf|bm|pmb"


def _compiled(*rewrites: tuple[str, str]) -> list[tuple[re.Pattern[str], str]]:
    return [(re.compile(pattern), new) for pattern, new in rewrites]


_LOOKS = _compiled(
    (r"(?<!\\)\\(?:(?:left|right)\.?(?![A-Za-z])|[!,])", ""),
    (r"(?<!\\)\\(?:[bB]igg?[lrm]?|displaystyle|textstyle|limits|bf|it|rm|sf)(?![A-Za-z])", ""),
    (rf"(?<!\\)\\(?:{_FONTS}) ?\{{(\w)\}}", r"\1"),
    (rf"(?<!\\)\\(?:{_FONTS})(?![A-Za-z])", ""),
    (r"\\operatorname ?\{ ?([a-z]+) ?\}", r"\\\1 "),
    (r"(?<![,;\\]) ?\\q?quad ?(?=[A-Za-z](?:_\w)? ?=)", ", "),
    (r"(?<!\\)\\(?:[;: ]|q?quad(?![A-Za-z]))", " "),
    (r"\\(?:textbf|textit|textrm|textnormal|texttt|mathrm|mbox|emph) ?(?=\{)", r"\\text"),
    (rf"\\text ?\{{ ?({_FUNCTIONS}) ?\}}", r"\\\1 "),
    (r"\\text ?\{([ei])\}", r"\1"),
)
"""Space, and commands that only affect appearance."""
_SYNONYMS = _compiled(
    (r"(?<!\\)\\\$", ""),
    (r"(?<!\\)\\([%#])", r"\1"),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"\\(?:leq|leqslant)(?![A-Za-z])", r"\\le"),
    (r"\\(?:geq|geqslant)(?![A-Za-z])", r"\\ge"),
    (r"\\neq(?![A-Za-z])", r"\\ne"),
    (r"\\(?:simeq|doteq|approxeq)(?![A-Za-z])", r"\\approx"),
    (r"\\(?:[lr]vert|vert|mid)(?![A-Za-z])", "|"),
    (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
    (r"\\degree(?![A-Za-z])|\^ ?\{ ?\\circ ?\}", r"^\\circ"),
)
_BRACES = _compiled(
    (r"\\frac ?(\d)", r"\\frac{\1}"),
    (r"(\\frac ?\{[^{}]*\}) ?([0-9a-z])", r"\1{\2}"),
    (r"\^ ?(\\frac ?\{[^{}]*\}\{[^{}]*\})", r"^{\1}"),
    (r"\\sqrt ?([0-9a-z])", r"\\sqrt{\1}"),
    (r"(\\sqrt ?\[[^][]*\]) ?([0-9a-z])", r"\1{\2}"),
)
"""Braces that LaTeX lets one leave out."""
_PLAIN = _compiled(
    (rf"(?<![\\A-Za-z])({_FUNCTIONS})(?![A-Za-z])", r"\\\1 "),
    (r"\{,\}", ","),
    (r"(?<=\w)\*\*(?=\w)", "^"),
    (r"[~\s\u2026\u2190-\u21ff\u2500-\u2bff\ufe0f\U0001f000-\U0001faff]+", " "),
)
_WITH_COMMANDS = [*_LOOKS, *_SYNONYMS, *_PLAIN, *_BRACES]

ASSIGNMENT = re.compile(r"[A-Za-z](?:_\w|_\{\w+\})? *= *[^=<>A-Za-z]*(?:\\[a-z]+[^=<>A-Za-z]*)*")
"""The value of one variable, such as ``x_1 = 5``."""
_ENVIRONMENT = re.compile(
    r"(?:\\\{ ?)?\\begin\{(align|aligned|alignat|equation|gather|gathered|split|cases|eqnarray"
    r"|array)\*?\}(?: ?\{[lcr| ]*\})?(.*)\\end\{\1\*?\}"
)
_NEXT_FORMULA = re.compile(r"\$[ \t]*\n\s*\$")
_LABEL = re.compile(
    r"(?:\\text ?\{[^{}]*(?:[:=]|\b(?:is|are)) ?\}|\\text ?\{[^{}]*\} ?="
    r"|[A-Za-z][A-Za-z ]{3,}[:=]|\\(?:approx|Rightarrow|implies|therefore)|=>|[:=~])(?=.)"
)
_WRAPPERS = [
    re.compile(pattern)
    for pattern in [
        r"\\\((?P<inside>.+)\\\)",
        r"\\\[(?P<inside>.+)\\\]",
        r"\\text ?\{(?P<inside>[^{}]*)\}",
        r"([*_`\"'])\1{0,2}(?P<inside>(?:(?!\1).)+)\1{1,3}",
    ]
]
_OPENING = re.compile(r"(?:\\(?:boxed|fbox) ?)?([({\[])")
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_PUNCTUATION = ".,;:*?"


def clean(text: str) -> str:
    """Return an answer in plain notation."""
    text = _NEXT_FORMULA.sub("$, $", text.translate(_CHARACTERS))
    for pattern, new in _WITH_COMMANDS if "\\" in text else _PLAIN:
        text = pattern.sub(new, text)
    if text.count("$") % 2 == 0:  # otherwise one is a currency
        text = text.replace("$", "")
    before = None
    while text != before:
        before = text
        text = _without_wrapper(text.strip().rstrip(_PUNCTUATION).lstrip("*").strip())
    return text


def _without_wrapper(text: str) -> str:
    """Remove one layer of what is around the whole text."""
    if match := _OPENING.match(text):
        inside = text[match.end() : -1]
        if text.endswith(_CLOSING[match[1]]) and not text.endswith("\\}") and _is_balanced(inside):
            is_list = match[1] != "{" and ("," in inside or ";" in inside)
            return text if is_list else inside
    if (match := _ENVIRONMENT.fullmatch(text)) and (rows := _rows_of(match[1], match[2])):
        return rows
    for wrapper in _WRAPPERS:
        if match := wrapper.fullmatch(text):
            return match["inside"]
    if match := _LABEL.match(text):
        return text[match.end() :]
    return text


def _rows_of(name: str, environment: str) -> str | None:
    r"""Return the rows of ``align`` as one line: equations, or the last one of a derivation."""
    rows: list[str] = []
    for row in environment.replace("&", " ").split("\\\\"):
        if rows and re.match(r"\s*(?:=|\\approx)", row):
            rows[-1] += row
        elif row.strip():
            rows.append(row.strip().rstrip(".,"))
    names = {row.partition("=")[0].strip() for row in rows if ASSIGNMENT.fullmatch(row)}
    if rows and len(names) == len(rows):
        return ", ".join(rows)
    return rows[-1] if rows and name not in ("array", "cases") else None


def _is_balanced(text: str) -> bool:
    """Return whether no bracket that was opened before the text is closed in it."""
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return False
    return depth == 0
