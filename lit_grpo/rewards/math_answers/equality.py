"""Compare structured answers part by part, down to formulas for computer algebra."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Iterator
from typing import Protocol

from lit_grpo.rewards.math_answers.answers import Answer, compare, parse_answer
from lit_grpo.rewards.math_answers.structure import (
    MAX_ITEMS,
    Items,
    is_name,
    items_of,
    readings_of,
    sides_of,
)

_MEMBER = re.compile(r"^[^\\]{1,20}\\in(?![a-z])(?P<set>.+)")
_BUILDER = re.compile(r"^\\\{ ?\w+ ?(?:\\in ?\\mathbb\{R\} ?)?[|:](?P<condition>.+)\\\}$")
_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z]")


class Algebra(Protocol):
    """Compares two formulas; may raise ``TimeoutError``."""

    def __call__(self, name: str, *texts: str) -> Awaitable[bool]: ...


async def are_equal(gold: Answer | None, answer: Answer | None, algebra: Algebra) -> bool:
    """Return whether two answers are the same."""
    if gold is None or answer is None:
        return False
    verdict = compare(gold, answer)
    if verdict is not None:
        return verdict
    if r"\approx" in gold.text or r"\approx" in answer.text:
        return await _is_any_reading_equal(gold, answer, algebra)
    golds, answers = items_of(gold.text), items_of(answer.text)
    if len(golds.texts) > 1 and len(answers.texts) > 1:
        return await _are_equal_lists(golds, answers, algebra)
    if len(golds.texts) != len(answers.texts):
        is_interval = len(golds.texts) + len(answers.texts) == 3  # the other is a relation
        if not is_interval or golds.brackets == answers.brackets:
            return False
        return await algebra("is_equal", *_bare(gold.text, answer.text))
    return await _are_equal_sides(gold, answer, algebra)


def formulas_of(gold: Answer) -> Iterator[Answer | None]:
    """Yield the parts of a gold answer that its comparison has to read."""
    for reading in readings_of(gold.text):
        for part in items_of(reading).texts:
            first, *rest = sides_of(*_bare(part))
            yield parse_answer(rest[-1] if rest and is_name(first) else part)


async def _is_any_reading_equal(gold: Answer, answer: Answer, algebra: Algebra) -> bool:
    r"""Compare each side of ``\approx``; an answer whose sides contradict each other is wrong."""
    readings = [one for one in readings_of(answer.text) if one and not is_name(one)]
    for exact, rounded in zip(readings, readings[1:], strict=False):
        if not await algebra("is_near", sides_of(exact)[-1], rounded):
            return False
    for gold_text in readings_of(gold.text):
        for text in readings:
            if await are_equal(parse_answer(gold_text), parse_answer(text), algebra):
                return True
    return False


async def _are_equal_lists(golds: Items, answers: Items, algebra: Algebra) -> bool:
    count = len(golds.texts)
    if count != len(answers.texts) or count > MAX_ITEMS:
        return False
    if golds.name and not _are_values_of(golds.name, answers):
        return False
    brackets = {golds.brackets, answers.brackets}
    if len(brackets) > 1 and not brackets & {""}:
        return False
    if brackets <= {"", "()"} and "()" in brackets or brackets & {"[]", "[)", "(]"}:
        return await _are_equal_tuples(golds, answers, algebra)
    rest = [parse_answer(text) for text in answers.texts]
    for text in golds.texts:
        gold = parse_answer(text)
        for index, answer in enumerate(rest):
            if await are_equal(gold, answer, algebra):
                del rest[index]
                break
        else:
            return False
    return True


def _are_values_of(name: str, answers: Items) -> bool:
    """Return whether no answer is said to be the value of another variable."""
    names = [sides[0] for text in answers.texts if len(sides := sides_of(text)) > 1]
    if answers.name:
        names = [*names, answers.name]
    return all(_plain(one) == _plain(name) for one in names)


async def _are_equal_tuples(golds: Items, answers: Items, algebra: Algebra) -> bool:
    for gold, answer in zip(golds.texts, answers.texts, strict=True):
        if not await are_equal(parse_answer(gold), parse_answer(answer), algebra):
            return False
    return True


async def _are_equal_sides(gold: Answer, answer: Answer, algebra: Algebra) -> bool:
    """Compare equations, or the value of one with a value."""
    golds, answers = sides_of(gold.text), sides_of(answer.text)
    if len(golds) == 1 and len(answers) == 1:
        return await algebra("is_equal", *_bare(gold.text, answer.text))
    are_named = [is_name(sides[0]) for sides in (golds, answers)]
    if len(golds) == 1:
        return await are_equal(gold, parse_answer(answers[-1]), algebra)
    if len(answers) == 1:
        is_value = are_named[0] or not _LETTER.search(golds[0])
        return is_value and await are_equal(parse_answer(golds[-1]), answer, algebra)
    if all(are_named) and _plain(golds[0]) == _plain(answers[0]):
        return await are_equal(parse_answer(golds[-1]), parse_answer(answers[-1]), algebra)
    equations = [f"{sides[0]}={sides[-1]}" for sides in (golds, answers)]
    return await algebra("is_equal", *equations)


def _plain(name: str) -> str:
    return re.sub(r"[\s{}\\]|text", "", name)


def _bare(*texts: str) -> list[str]:
    r"""Return ``S`` for each ``x \in S``, and the condition of a set."""
    return [_MEMBER.sub(r"\g<set>", _BUILDER.sub(r"\g<condition>", text)) for text in texts]
