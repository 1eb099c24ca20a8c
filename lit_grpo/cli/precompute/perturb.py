"""Wrong answers that look like a right one: other numbers, or the right answer to another row.

They may be right by accident; whoever uses them has them checked.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal

NUMBER = re.compile(r"(?<![\d.])-?\d[\d,]*(?:\.\d+)?")


def wrong_answers(answer: str, others: Sequence[str], seed: str) -> list[str]:
    """Return answers that differ from this one, in an order that the seed fixes.

    Args:
        answer: The right one.
        others: Right answers to other rows.
        seed: Such as the key of the row.
    """
    order = random.Random(seed)
    changed = list(dict.fromkeys(one for one in _other_numbers(answer) if one != answer))
    foreign = [one for one in dict.fromkeys(others) if _plain(one) != _plain(answer)]
    order.shuffle(changed)
    order.shuffle(foreign)
    return [*changed, *foreign]


def with_answer(solution: str, right: str, wrong: str) -> str:
    """Return a worked solution that ends with another answer: the last right one is replaced."""
    before, found, after = solution.rpartition(right)
    return f"{before}{wrong}{after}" if found else stated(wrong)


def stated(answer: str) -> str:
    return f"The answer is {answer}."


def _other_numbers(answer: str) -> Iterator[str]:
    """Yield the answer with another value for its last number."""
    numbers = list(NUMBER.finditer(answer))
    if not numbers:
        return
    last = numbers[-1]
    for value in _near(last[0].replace(",", "")):
        yield f"{answer[: last.start()]}{value}{answer[last.end() :]}"


def _near(number: str) -> Iterator[str]:
    """Yield values that a mistake could give: one more or less, a digit lost, moved or added."""
    value = Decimal(number)
    step = Decimal(1).scaleb(min(0, int(value.as_tuple().exponent)))
    for other in (value + step, value - step, value * 10, value * 2, value + 10 * step):
        yield f"{other:f}"
    sign, digits = ("-", number[1:]) if number.startswith("-") else ("", number)
    if value:
        yield digits if sign else f"-{digits}"
    for place in range(len(digits) - 1):
        one, two = digits[place], digits[place + 1]
        if one.isdigit() and two.isdigit() and one != two and (place or two != "0"):
            yield f"{sign}{digits[:place]}{two}{one}{digits[place + 2 :]}"
