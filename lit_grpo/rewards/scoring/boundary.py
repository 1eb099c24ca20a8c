"""The boundary between user code and the trainer: turn whatever a reward returns or raises into a
``Score``, which has either a finite value or the outcome that says why there is none.

A failure that looks like a mistake in the reward's code is marked as a bug. Of a sync reward it is
permanent; an async one may wait for a service, whose unexpected reply also looks like a bug.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Set, Sized
from dataclasses import replace
from decimal import Decimal
from numbers import Real
from pathlib import Path

from lit_grpo.types import Outcome, Score
from lit_grpo.types.functions import defined_at, users_line, users_traceback

MAX_DETAIL_CHARACTERS = 500
MAX_PLACE_CHARACTERS = 100
MAX_BUG_CHARACTERS = 4000

PROGRAMMING_ERRORS = (
    LookupError, TypeError, ValueError, AttributeError, NameError, ArithmeticError, AssertionError,
    ImportError, SyntaxError, NotImplementedError, RecursionError, re.error, SystemExit,
    MemoryError, StopIteration, StopAsyncIteration,
)  # fmt: skip
"""Exceptions that usually mean a mistake in the code, such as a missing column."""


UNORDERED_OR_TEXT = (str, bytes, Mapping, Set)
"""What one can iterate over, although its items do not stand for the completions in turn."""


def as_scores(
    result: object, count: int, seconds: float, scorer: Callable[..., object]
) -> tuple[Score, ...]:
    """Convert what ``score_group`` returned to ``count`` scores, which share its ``seconds``.

    Args:
        scorer: The user's function or method that returned it.
    """
    if not isinstance(result, Iterable) or isinstance(result, UNORDERED_OR_TEXT):
        return _wrong_shape(_show(result), count, seconds, scorer)
    values = list(result)
    if len(values) != count:
        return _wrong_shape(_plural(len(values), "value"), count, seconds, scorer)
    return tuple(as_score(value, seconds / count, scorer) for value in values)


def as_score(value: object, seconds: float, scorer: Callable[..., object]) -> Score:
    """Convert what ``score`` returned to a score, and set its ``seconds`` if the reward did not."""
    if value is None:
        return Score(value=None, outcome=Outcome.ABSTAIN, seconds=seconds)
    if isinstance(value, Score):
        return value if value.seconds else replace(value, seconds=seconds)
    try:
        return Score(value=_as_float(value), seconds=seconds)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        detail = f"{_describe(scorer)}: {error}"
        (score,) = _no_scores(detail, 1, seconds, bug=detail)
        return score


def _wrong_shape(
    returned: str, count: int, seconds: float, scorer: Callable[..., object]
) -> tuple[Score, ...]:
    detail = (
        f"{_describe(scorer)} returned {returned} for {_plural(count, 'completion')}. It must "
        "return a list with one value for each of them. To score one completion at a time, let a "
        "function take solution_str instead of completions, and let a class define score instead "
        "of score_group."
    )
    return _no_scores(detail, count, seconds, bug=detail)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _describe(function: Callable[..., object]) -> str:
    """Return the name of a function and where it is defined: ``short (my_rewards.py, line 3)``."""
    named, code = defined_at(function)
    name: str = named.__qualname__.rpartition("<locals>.")[2]
    if code is None:
        return name
    path = Path(code.co_filename)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{name} ({shown}, line {code.co_firstlineno})"


def failed_scores(error: BaseException, count: int, seconds: float) -> tuple[Score, ...]:
    """Convert what the reward raised to ``count`` scores without a value."""
    outcome = Outcome.TIMEOUT if isinstance(error, TimeoutError) else Outcome.ERROR
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    bug = users_traceback(error) if _is_bug(error) else ""
    if not bug:  # it counts as an outage, and may be a mistake all the same
        text = f"{text[: MAX_DETAIL_CHARACTERS - MAX_PLACE_CHARACTERS]}{users_line(error)}"
    return _no_scores(text, count, seconds, outcome, bug=bug)


def _is_bug(error: BaseException) -> bool:
    """Return whether an exception means a mistake in the code, not a service that is down.

    Clients of services derive their errors from OSError, some also from ValueError.
    """
    if isinstance(error.__cause__, StopIteration):
        error = error.__cause__  # within a coroutine Python makes a RuntimeError of it
    return isinstance(error, PROGRAMMING_ERRORS) and not isinstance(error, OSError)


def as_permanent(scores: Iterable[Score]) -> tuple[Score, ...]:
    """Mark the bugs among the scores of a sync reward: a retry would fail as well."""
    return tuple(replace(score, is_permanent=bool(score.bug)) for score in scores)


def _no_scores(
    detail: str, count: int, seconds: float, outcome: Outcome = Outcome.ERROR, *, bug: str = ""
) -> tuple[Score, ...]:
    score = Score(
        value=None,
        outcome=outcome,
        detail=detail[:MAX_DETAIL_CHARACTERS],
        seconds=seconds / count,
        bug=bug[-MAX_BUG_CHARACTERS:],
    )
    return (score,) * count


def _as_float(value: object) -> float:
    """Convert a number of Python, NumPy or torch; a tensor must have one element."""
    number = value.item() if hasattr(value, "item") else value
    if not isinstance(number, Real | Decimal):
        raise TypeError(f"returned {_show(value)}, not a number, None or a Score")
    return float(number)


def _show(value: object) -> str:
    size = f" of length {len(value)}" if isinstance(value, Sized) else ""
    return f"{reprlib.repr(value)} ({type(value).__name__}{size})"
