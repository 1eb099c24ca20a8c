"""The boundary between user code and the trainer: turn whatever a reward returns or raises into a
``Score``, which has either a finite value or the outcome that says why there is none.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sized
from dataclasses import replace
from numbers import Real

from lit_grpo.types import Outcome, Score

MAX_DETAIL_CHARACTERS = 500


def as_scores(result: object, count: int, seconds: float) -> tuple[Score, ...]:
    """Convert what ``score_group`` returned to ``count`` scores, which share its ``seconds``."""
    if not isinstance(result, Iterable) or isinstance(result, str | bytes | dict):
        return _no_scores(f"score_group returned {_show(result)}, not a sequence", count, seconds)
    values = list(result)
    if len(values) != count:
        return _no_scores(
            f"score_group returned {len(values)} scores for {count} completions", count, seconds
        )
    return tuple(as_score(value, seconds / count) for value in values)


def as_score(value: object, seconds: float) -> Score:
    """Convert what ``score`` returned to a score, and set its ``seconds`` if the reward did not."""
    if value is None:
        return Score(value=None, outcome=Outcome.ABSTAIN, seconds=seconds)
    if isinstance(value, Score):
        return value if value.seconds else replace(value, seconds=seconds)
    try:
        return Score(value=_as_float(value), seconds=seconds)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        return Score(value=None, outcome=Outcome.ERROR, detail=str(error), seconds=seconds)


def failed_scores(error: BaseException, count: int, seconds: float) -> tuple[Score, ...]:
    """Convert what the reward raised to ``count`` scores without a value."""
    outcome = Outcome.TIMEOUT if isinstance(error, TimeoutError) else Outcome.ERROR
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return _no_scores(text, count, seconds, outcome)


def _no_scores(
    detail: str, count: int, seconds: float, outcome: Outcome = Outcome.ERROR
) -> tuple[Score, ...]:
    detail = detail[:MAX_DETAIL_CHARACTERS]
    return (Score(value=None, outcome=outcome, detail=detail, seconds=seconds / count),) * count


def _as_float(value: object) -> float:
    """Convert a number of Python, NumPy or torch; a tensor must have one element."""
    number = value.item() if hasattr(value, "item") else value
    if not isinstance(number, Real):
        raise TypeError(f"returned {_show(value)}, not a number, None or a Score")
    return float(number)


def _show(value: object) -> str:
    size = f" of length {len(value)}" if isinstance(value, Sized) else ""
    return f"{reprlib.repr(value)} ({type(value).__name__}{size})"
