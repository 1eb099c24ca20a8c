"""Make wrong answers that look right: other numbers, or the right answer to another row.

Some may be right by accident, so the caller must have them checked.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal

from lit_grpo.data.rows.prepared import normalised_text

NUMBER = re.compile(r"(?<![\d.])-?\d+(?:,\d{3})*(?:\.\d+)?", re.ASCII)


def wrong_answers(right: Sequence[str], others: Sequence[str], seed: str) -> list[str]:
    """Return answers that differ from the right ones, in an order that the seed fixes.

    Args:
        right: Right answers; the first one is changed.
        others: Right answers to other rows.
        seed: Such as the key of the row.
    """
    order = random.Random(seed)
    own = {*map(normalised_text, right)}
    changed, foreign = (
        [one for one in dict.fromkeys(some) if normalised_text(one) not in own]
        for some in (_other_numbers(right[0]), others)
    )
    order.shuffle(changed)
    order.shuffle(foreign)
    return [*changed, *foreign]


def with_answer(solution: str, right: Sequence[str], wrong: str) -> str:
    """Return a worked solution with its last right answer, if any, replaced by another one.

    The same number may be written in another way there: 1,250 for 1250.
    """
    own = {*map(_value, right)}
    spans = [one.span() for one in NUMBER.finditer(solution) if _value(one[0]) in own]
    if not spans:
        places = ((solution.rfind(one), one) for one in right)
        spans = [(place, place + len(one)) for place, one in places if place >= 0]
    if not spans:
        return stated(wrong)
    start, end = max(spans)
    return f"{solution[:start]}{wrong}{solution[end:]}"


def stated(answer: str) -> str:
    return f"The answer is {answer}."


def _value(text: str) -> Decimal | None:
    """Return a text as a number, or None if it is not only a number."""
    is_number = NUMBER.fullmatch(text)
    return Decimal(text.replace(",", "")) if is_number else None


def _other_numbers(answer: str) -> Iterator[str]:
    """Yield the answer with another value for its last number."""
    numbers = list(NUMBER.finditer(answer))
    if not numbers:
        return
    last = numbers[-1]
    number = last[0].replace(",", "")
    for value in _near(number):
        if Decimal(value) != Decimal(number):
            yield f"{answer[: last.start()]}{value}{answer[last.end() :]}"


def _near(number: str) -> Iterator[str]:
    """Yield values that a mistake could give: one more or less, a digit lost, moved or added."""
    value = Decimal(number)
    step = Decimal(1).scaleb(min(0, int(value.as_tuple().exponent)))
    for other in (value + step, value - step, value * 10, value * 2, value + 10 * step):
        yield f"{other:f}"
    sign, digits = ("-", number[1:]) if number.startswith("-") else ("", number)
    yield digits if sign else f"-{digits}"
    for index in range(len(digits) - 1):
        one, two = digits[index], digits[index + 1]
        if one.isdigit() and two.isdigit() and (index or two != "0"):
            yield f"{sign}{digits[:index]}{two}{one}{digits[index + 2 :]}"
