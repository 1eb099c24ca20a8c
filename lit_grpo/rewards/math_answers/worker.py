"""What a worker process calls to ask math-verify, on which some answers hang.

It imports nothing of this package, which keeps the start of a worker short.
"""

from __future__ import annotations

import contextlib
import logging
from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Eq, FiniteSet, Float, Interval, Tuple, nan, simplify, solve, zoo

NUMERIC_PRECISION = 200
"""Digits; with math-verify's 15, all numbers below 1e-15 are equal."""
MAX_RELATIVE_ERROR = 1e-5
"""Of a decimal against an irrational number; math-verify alone looks at six decimals."""

logging.disable(logging.CRITICAL)


@lru_cache(maxsize=10_000)
def is_equal(gold: str, answer: str) -> bool:
    """Whether two LaTeX answers mean the same. What cannot be parsed equals nothing.

    Remembered, since the completions of a group often agree.
    """
    parsed_gold, parsed_answer = _parse(gold), _parse(answer)
    if parsed_gold is None or parsed_answer is None or _is_undefined(parsed_answer):
        return False
    # A set in braces has no order and is not a point or an interval; a bare list may be either.
    if _is_ordered_against_braces((gold, parsed_gold), (answer, parsed_answer)):
        return False
    return (
        verify(
            parsed_gold,
            parsed_answer,
            numeric_precision=NUMERIC_PRECISION,
            allow_set_relation_comp=True,
            timeout_seconds=None,
            raise_on_error=True,
        )
        and _agree_closely(parsed_gold, parsed_answer)
        and not _are_both_unsolvable(parsed_gold, parsed_answer)
    )


def is_answer(gold: str) -> bool:
    """Whether the gold can be parsed, so that answers can be compared with it."""
    parsed = _parse(gold)
    return parsed is not None and not _is_undefined(parsed)


def _parse(latex: str) -> Any:
    # One box around the whole: outside of one, an equation is read as its last number.
    parsed = parse(
        rf"\boxed{{{latex}}}",
        extraction_config=[LatexExtractionConfig(boxed_match_priority=0)],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    return parsed[0] if parsed else None


def _is_undefined(expression: Any) -> bool:
    return expression.has(nan, zoo)


def _is_ordered_against_braces(*sides: tuple[str, Any]) -> bool:
    ordered = any(isinstance(expression, Tuple | Interval) for _, expression in sides)
    return ordered and any(
        isinstance(expression, FiniteSet) and r"\{" in text for text, expression in sides
    )


def _agree_closely(gold: Any, answer: Any) -> bool:
    """Six equal decimals are not enough for small numbers."""
    if not any(isinstance(one, Float) for one in (gold, answer)):
        return True
    with contextlib.suppress(TypeError, AttributeError):
        return bool(abs(gold - answer) <= MAX_RELATIVE_ERROR * abs(gold))
    return True


def _are_both_unsolvable(gold: Any, answer: Any) -> bool:
    """Two equations without solutions, which math-verify takes for equal, but not the same one."""
    if not (isinstance(gold, Eq) and isinstance(answer, Eq)):
        return False
    difference, other = gold.lhs - gold.rhs, answer.lhs - answer.rhs
    if simplify(difference / other).is_number:
        return False
    with contextlib.suppress(NotImplementedError):
        return not solve(gold, *gold.free_symbols)
    return False
