"""The functions of a worker process that runs math-verify, which hangs on some answers.

They import nothing of this package, so that workers start fast.
"""

from __future__ import annotations

import contextlib
import logging
from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Eq, FiniteSet, Float, Interval, Tuple, nan, simplify, solve, zoo

NUMERIC_PRECISION = 200
"""Digits; with math-verify's default of 15, all numbers below 1e-15 are equal."""
MAX_RELATIVE_ERROR = 1e-5
"""Tolerance between a decimal and an exact number, stricter than math-verify's six decimals."""

logging.disable(logging.CRITICAL)


@lru_cache(maxsize=10_000)
def is_equal(gold: str, answer: str) -> bool:
    """Return whether two LaTeX answers are equal; an answer that cannot be parsed equals nothing.

    Results are cached, since the completions of a group often agree.
    """
    parsed_gold, parsed_answer = _parse(gold), _parse(answer)
    if parsed_gold is None or parsed_answer is None or _is_undefined(parsed_answer):
        return False
    # A set in braces is unordered, so it is neither a point nor an interval; a bare list may be.
    if _is_ordered_against_braces((gold, parsed_gold), (answer, parsed_answer)):
        return False
    is_verified: bool = verify(
        parsed_gold,
        parsed_answer,
        numeric_precision=NUMERIC_PRECISION,
        allow_set_relation_comp=True,
        timeout_seconds=None,
        raise_on_error=True,
    )
    return (
        is_verified
        and _agree_closely(parsed_gold, parsed_answer)
        and not _are_both_unsolvable(parsed_gold, parsed_answer)
    )


def is_answer(gold: str) -> bool:
    """Return whether a gold answer can be parsed, so that answers can be compared with it."""
    parsed = _parse(gold)
    return parsed is not None and not _is_undefined(parsed)


def _parse(latex: str) -> Any:
    # In a box, since without one an equation is parsed as its last number.
    parsed = parse(
        rf"\boxed{{{latex}}}",
        extraction_config=[LatexExtractionConfig(boxed_match_priority=0)],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    return parsed[0] if parsed else None


def _is_undefined(expression: Any) -> bool:
    return bool(expression.has(nan, zoo))


def _is_ordered_against_braces(*sides: tuple[str, Any]) -> bool:
    ordered = any(isinstance(expression, Tuple | Interval) for _, expression in sides)
    return ordered and any(
        isinstance(expression, FiniteSet) and r"\{" in text for text, expression in sides
    )


def _agree_closely(gold: Any, answer: Any) -> bool:
    """Return False if a decimal is too far off: six equal decimals say little of small numbers."""
    if not any(isinstance(one, Float) for one in (gold, answer)):
        return True
    with contextlib.suppress(TypeError, AttributeError):
        return bool(abs(gold - answer) <= MAX_RELATIVE_ERROR * abs(gold))
    return True


def _are_both_unsolvable(gold: Any, answer: Any) -> bool:
    """Return whether two different equations have no solution; math-verify calls them equal."""
    if not (isinstance(gold, Eq) and isinstance(answer, Eq)):
        return False
    difference, other = gold.lhs - gold.rhs, answer.lhs - answer.rhs
    if simplify(difference / other).is_number:
        return False
    with contextlib.suppress(NotImplementedError):
        return not solve(gold, *gold.free_symbols)
    return False
