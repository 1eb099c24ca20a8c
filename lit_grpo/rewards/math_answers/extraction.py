r"""Find the final answer in a completion or a gold answer.

It is the last ``\boxed{}``, else ``#### x``, else "the answer is x" or ``A: x``, else the last
number. Only the end of a completion is read, and nothing after the start of a next question.
"""

from __future__ import annotations

import re
from functools import cache
from itertools import islice

from lit_grpo.rewards.math_answers.answers import (
    NUMBER,
    RATIO,
    Answer,
    clean,
    parse_answer,
    with_plain_fractions,
)

STOP_MARKERS = ("Human:", "User:", "Question:", "Problem:", "Q:")
MAX_STOPS = 4
"""Limits the work on a completion that consists of stop markers."""
NULL_GOLDS = frozenset({"None", "nan", "NaN", "null", "NULL", "N/A", "NA", "<NA>"})
"""Missing values that a data frame has turned into text."""

_BRACES = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|[{}]")
_HASHES = re.compile(r"####")
_STATEMENT = re.compile(
    r"\banswers?\b[*_]*(?:\s*(?:is|are|would be|will be|=)(?!\w)|\s*:)|^[ \t]*\**A\**:",
    re.IGNORECASE | re.MULTILINE,
)
_SENTENCE_END = re.compile(r"(?<=\S)[.;!?](?=\s|$)|,?\s(?:because|since|so|which|where)\s")
_MATH = re.compile(r"\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_PROSE = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{2,}\s+[A-Za-z]{2,}")
_FORMULA = re.compile(r"[\\\[({^<>]")
# A sign after a digit or a bracket is an operator.
_ANY_NUMBER = re.compile(rf"(?<![\d.,)}}\w])(?:{RATIO}|{NUMBER})|\d+(?:\.\d+)?", re.IGNORECASE)


def find_answer(text: str, stop_markers: tuple[str, ...], tail_characters: int) -> Answer | None:
    """Return the final answer of a completion, or None if it has none.

    The text before each stop marker is tried in turn, then the whole text; the first answer wins.
    """
    ends = []
    if any(marker in text for marker in stop_markers):
        stops = islice(_stop_pattern(stop_markers).finditer(text), MAX_STOPS)
        ends = [match.end() for match in stops]
    for end in (*ends, len(text)):
        tail = text[max(0, end - tail_characters) : end]
        answer = _marked_answer(tail) or _unmarked_answer(tail)
        if answer is not None:
            return answer
    return None


def read_gold(text: str) -> Answer | None:
    """Read a gold answer: the marked answer of a solution, else the whole text."""
    if text.strip() in NULL_GOLDS:
        return None
    gold = _marked_answer(text) or parse_answer(text)
    return None if gold is None or gold.is_sentence else gold


@cache
def _stop_pattern(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Match up to a marker at the start of a line, or after the end of a sentence or number."""
    return re.compile(rf"(?:\n\s*|[^\w\s]\s*|\d\s+)(?={'|'.join(map(re.escape, markers))})")


def _marked_answer(text: str) -> Answer | None:
    if "box" in text and (box := _last_box(text)) is not None:
        return parse_answer(box)
    for pattern in (_HASHES, _STATEMENT):
        *_, marker = None, *pattern.finditer(text)
        lines = text[marker.end() :].lstrip(" \t\n:*_").splitlines() if marker else []
        if lines:
            return _statement(lines[0])
    return None


def _last_box(text: str) -> str | None:
    r"""Return the content of the last complete, non-empty ``\boxed{}``."""
    content = None
    opened: list[tuple[int, bool]] = []
    for match in _BRACES.finditer(text):
        if match["box"] or match[0] == "{":
            opened.append((match.end(), match["box"] is not None))
        elif match[0] == "}" and opened:
            start, is_box = opened.pop()
            if is_box and text[start : match.start()].strip():
                content = text[start : match.start()]
    return content


def _statement(line: str) -> Answer | None:
    """Return the answer in the line after "the answer is", which may be a whole sentence."""
    answer = parse_answer(line)
    if answer is None or answer.number is not None:
        return answer
    for match in _MATH.finditer(line):
        if not _PROSE.search(match[0]):
            return parse_answer(match[0])
    sentence = parse_answer(_SENTENCE_END.split(line, maxsplit=1)[0])
    if sentence is None or sentence.number is not None or not _PROSE.search(sentence.text):
        return sentence
    first = _ANY_NUMBER.match(sentence.text)
    return (parse_answer(first[0]) if first else _last_number(sentence.text)) or sentence


def _unmarked_answer(text: str) -> Answer | None:
    """Return the last formula (in dollar signs, or a whole last line), else the last number."""
    *_, formula = None, *_MATH.finditer(text)
    if formula and not _PROSE.search(formula[0]) and not _ANY_NUMBER.search(text, formula.end()):
        return parse_answer(formula[0])
    line = (text.strip().splitlines() or [""])[-1]
    is_whole = line.count("{") == line.count("}")
    if is_whole and _FORMULA.search(line) and not _PROSE.search(line):
        return parse_answer(line)
    return _last_number(text)


def _last_number(text: str) -> Answer | None:
    found = [match[0] for match in _ANY_NUMBER.finditer(with_plain_fractions(clean(text)))]
    return parse_answer(found[-1]) if found else None
