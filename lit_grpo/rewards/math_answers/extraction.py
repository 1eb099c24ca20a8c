r"""Find the final answer in a completion or a gold answer.

It is marked by ``<answer>``, else by ``\boxed{}``, else by ``####``, "the answer is" or ``A:``,
whichever comes last. Without a mark it is the last formula or number, or a completion of up to
three words as a whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import islice

from lit_grpo.rewards.math_answers.answers import Answer, parse_answer
from lit_grpo.rewards.math_answers.boxes import boxed_answer
from lit_grpo.rewards.math_answers.choices import choice_in
from lit_grpo.rewards.math_answers.sentences import (
    answer_in_lines,
    answer_in_sentence,
    has_prose,
    last_answer,
)

STOP_MARKERS = ("Human:", "User:", "Question:", "Problem:", "Q:")
MAX_STOPS = 4
MAX_MARKS = 8
"""Limits the work on a completion that consists of markers."""
MAX_ANSWER_CHARACTERS = 2000
NULL_GOLDS = frozenset({"None", "nan", "NaN", "null", "NULL", "N/A", "NA", "<NA>"})
"""Missing values that a data frame has turned into text."""

_JSON_OF_TEXTS = re.compile(r'\s*[\[{]+\s*"')
_SPECIAL_TOKEN = re.compile(r"<\|[\w ]{1,40}\|>|</?s>|<(?:eos|bos|pad|start_of_turn|end_of_turn)>")
_FONT_TAG = re.compile(r"</?(?:b|em|strong)>")
_TAG = re.compile(r"[<\[](/?)(answer|final_answer|solution)[>\]]", re.IGNORECASE)
_HEADING_MARK = re.compile(r"####(?!#)")
_KEYWORDS = ("answer", "ans:", "ans.", "correct option", "correct choice", "a:", "a**:")
_ANSWER = r"(?<![A-Za-z])(?:answers?|ans|correct (?:option|choice))\b"
_LABEL = rf"{_ANSWER}[*_\"'`]{{0,3}}\s?(?::|=>?|->|→|[-–—](?=\s)|\.(?=\s?[$\d-]))"
_HEADING = r"^[ \t#*_>-]{0,20}(?:the |my )?(?:final |correct )?answer[*_]{0,3}[ \t]*$"
# An article is in lower case and before something: "the answer is A." names a choice.
_DETERMINER = r"\s+(?:(?:not|the|our|my)\b|(?-i:an?)\s+\S)"
_SENTENCE = rf"{_ANSWER}[^\n.:?!=]{{0,60}}?\b(?:is|are|be|equals?)\b(?!{_DETERMINER})"
_LETTER = r"^[ \t>*-]{0,20}A\**:"
_MARK = re.compile(f"{_LABEL}|{_HEADING}|{_SENTENCE}|{_LETTER}", re.IGNORECASE | re.MULTILINE)
_VERDICT = re.compile(
    r"(?:,?\s(?:which|this|that))?\s(?:is|as)\s+(?:the|our|my)\s+(?:final |correct )?answer\b"
    r"|\s\((?:final )?answer\)",
    re.IGNORECASE,
)


def find_answer(text: str, stop_markers: tuple[str, ...], tail_characters: int) -> Answer | None:
    """Return the final answer of a completion, or None if it has none.

    A stop marker ends the completion if there is a marked answer before it. Without any mark only
    the tail is read.
    """
    text = _without_tokens(text)
    for beginning in _beginnings(text, stop_markers):
        if answer := _marked_answer(beginning):
            return answer
    return last_answer(text[-tail_characters:]) or _whole_answer(text)


def find_choice(text: str, stop_markers: tuple[str, ...]) -> str | None:
    """Return the letter of a choice, as in "(B) Paris", that is marked or all of a completion."""
    text = _without_tokens(text)
    for beginning in _beginnings(text, stop_markers):
        if (line := _marked_line(beginning)) is not None:
            return choice_in(line)
    return choice_in(text.strip())


def _without_tokens(text: str) -> str:
    return _FONT_TAG.sub("", _SPECIAL_TOKEN.sub("\n", text)) if "<" in text else text


def _beginnings(text: str, stop_markers: tuple[str, ...]) -> Iterator[str]:
    """Yield what stands before each of the first stop markers, then the whole text."""
    if any(marker in text for marker in stop_markers):
        for stop in islice(_stop_pattern(stop_markers).finditer(text), MAX_STOPS):
            yield text[: stop.end()]
    yield text


def _whole_answer(text: str) -> Answer | None:
    """Return a text that is nothing but up to three words or a letter."""
    answer = parse_answer(text.strip())
    if answer is None or answer.is_sentence:
        return None
    return answer if answer.kind == "words" or len(answer.text) == 1 else None


def read_golds(text: str) -> tuple[Answer | None, ...]:
    """Read a gold answer, or each of those in a JSON list; None for one that cannot be read."""
    return tuple(map(read_gold, gold_texts(text)))


def gold_texts(text: str) -> list[str]:
    """Return a gold answer, or those in a JSON list; of other JSON with texts an empty text.

    Only a list of texts, such as ``["1/2", "0.5"]``, is one: ``[1, 2]`` is an interval.
    """
    with suppress(ValueError, RecursionError):
        value = json.loads(text) if _JSON_OF_TEXTS.match(text) else None
        if isinstance(value, list) and all(isinstance(one, str) for one in value):
            return value
        if isinstance(value, dict | list):
            return [""]
    return [text]


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
    if tagged := _tagged_text(text):
        return _marked_answer(tagged) or _bare_answer(tagged[-MAX_ANSWER_CHARACTERS:])
    if "box" in text and (box := boxed_answer(text)):
        return box
    for mark in _last_marks(text):
        content = _at_mark(text, mark)
        if mark.re is _VERDICT:
            answer = answer_in_sentence(content)
        elif mark.re is _HEADING_MARK:
            answer = _under_heading_mark(content)
        else:
            answer = answer_in_lines(content) or answer_in_sentence(content.partition("\n")[0])
        if answer is not None and not (answer.kind == "words" and "answer" in answer.text):
            return answer
    return None


def _marked_line(text: str) -> str | None:
    """Return the line that is marked as the answer; empty for a formula in a box."""
    if (tagged := _tagged_text(text)) is not None:
        return tagged
    if "box" in text and boxed_answer(text):
        return ""
    marks = _last_marks(text)
    return _at_mark(text, marks[0]).partition("\n")[0] if marks else None


def _bare_answer(text: str) -> Answer | None:
    if "\n" not in text:
        return answer_in_sentence(text)
    return answer_in_lines(text) or last_answer(text)


def _last_marks(text: str) -> list[re.Match[str]]:
    """Return the last marks of an answer, the very last first."""
    return sorted(_marks(text), key=re.Match.end, reverse=True)[:MAX_MARKS]


def _at_mark(text: str, mark: re.Match[str]) -> str:
    """Return what a mark marks: the line before a verdict, else the text after the mark."""
    if mark.re is _VERDICT:
        start = max(0, mark.start() - MAX_ANSWER_CHARACTERS)
        return text[start : mark.start()].rpartition("\n")[2]
    content = text[mark.end() :][:MAX_ANSWER_CHARACTERS]
    return content if mark.re is _HEADING_MARK else content.lstrip(" \t\n:*_\"'`>")


def _marks(text: str) -> list[re.Match[str]]:
    marks = list(_HEADING_MARK.finditer(text)) if "####" in text else []
    lower = text.lower()
    if any(keyword in lower for keyword in _KEYWORDS):
        marks += [*_MARK.finditer(text), *_VERDICT.finditer(text)]
    return marks


def _tagged_text(text: str) -> str | None:
    """Return the content of the last ``<answer>…</answer>``."""
    if "</" not in text and "[/" not in text:
        return None
    end = None
    for match in reversed([*_TAG.finditer(text)][-MAX_MARKS:]):
        if match[1]:
            end = match
        elif end and end[2].lower() == match[2].lower():
            return text[match.end() : end.start()].strip()
    return None


def _under_heading_mark(text: str) -> Answer | None:
    """Return the answer after ``####``, unless that is a heading of Markdown."""
    line, _, rest = text.lstrip(" \t:").partition("\n")
    answer = answer_in_sentence(line)
    is_heading = answer is None or answer.number is None or has_prose(line)
    return None if is_heading and rest.strip() else answer
