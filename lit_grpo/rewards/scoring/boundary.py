"""The boundary between user code and the trainer: whatever a reward returns or raises becomes a
Score. Nothing passes that is neither a finite value nor a named outcome.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sized
from dataclasses import replace
from numbers import Real

from lit_grpo.types import Outcome, Score

MAX_DETAIL_CHARACTERS = 500


def as_scores(result: object, count: int, seconds: float) -> tuple[Score, ...]:
    """What ``score_group`` returned, as ``count`` scores that share its ``seconds``."""
    if not isinstance(result, Iterable) or isinstance(result, str | bytes | dict):
        return _no_scores(f"score_group returned {_show(result)}, not a sequence", count, seconds)
    values = list(result)
    if len(values) != count:
        return _no_scores(
            f"score_group returned {len(values)} scores for {count} completions", count, seconds
        )
    return tuple(as_score(value, seconds / count) for value in values)


def as_score(value: object, seconds: float) -> Score:
    """What ``score`` returned for one completion, as a score with its ``seconds`` filled."""
    if value is None:
        return Score(value=None, outcome=Outcome.ABSTAIN, seconds=seconds)
    if isinstance(value, Score):
        return value if value.seconds else replace(value, seconds=seconds)
    try:
        return Score(value=_as_float(value), seconds=seconds)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        return Score(value=None, outcome=Outcome.ERROR, detail=str(error), seconds=seconds)


def failed_scores(error: BaseException, count: int, seconds: float) -> tuple[Score, ...]:
    """What the reward raised, as ``count`` scores without a value."""
    outcome = Outcome.TIMEOUT if isinstance(error, TimeoutError) else Outcome.ERROR
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return _no_scores(text, count, seconds, outcome)


def _no_scores(
    detail: str, count: int, seconds: float, outcome: Outcome = Outcome.ERROR
) -> tuple[Score, ...]:
    detail = detail[:MAX_DETAIL_CHARACTERS]
    return (Score(value=None, outcome=outcome, detail=detail, seconds=seconds / count),) * count


def _as_float(value: object) -> float:
    """Numbers of Python, NumPy and torch, a tensor of one element included."""
    number = value.item() if hasattr(value, "item") else value
    if not isinstance(number, Real):
        raise TypeError(f"returned {_show(value)}, not a number, None or a Score")
    return float(number)


def _show(value: object) -> str:
    size = f" of length {len(value)}" if isinstance(value, Sized) else ""
    return f"{reprlib.repr(value)} ({type(value).__name__}{size})"
