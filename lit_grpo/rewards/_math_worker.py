"""A process of its own that asks math-verify, so that the trainer can kill an answer that hangs.

It reads one JSON request a line on stdin and answers on stdout; it ends when stdin does. It is
run as a file and imports nothing of this package, which keeps its start short.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Eq, FiniteSet, Float, Interval, Tuple, nan, simplify, solve, zoo

MAX_MEMORY_BYTES = 4 * 2**30
"""Of address space; what needs more fails here and not in the trainer."""
NUMERIC_PRECISION = 200
"""Digits; with math-verify's 15, all numbers below 1e-15 are equal."""
MAX_RELATIVE_ERROR = 1e-5
"""Of a decimal against an irrational number; math-verify alone looks at six decimals."""


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


def _reply(request: dict[str, str], deadline_seconds: float) -> dict[str, Any]:
    # Kills this process, by default action, should the trainer be gone and unable to.
    signal.setitimer(signal.ITIMER_REAL, deadline_seconds + 1)
    try:
        return {"result": is_equal(**request) if "answer" in request else is_answer(**request)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main(deadline_seconds: float) -> None:
    """Serves requests ``{"gold": …, "answer": …}``, or without ``answer`` to test a gold."""
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    # Only replies may reach the pipe, whatever a library prints.
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)
        print(json.dumps({"result": "ready"}), file=replies, flush=True)
        for line in sys.stdin:
            print(json.dumps(_reply(json.loads(line), deadline_seconds)), file=replies, flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
