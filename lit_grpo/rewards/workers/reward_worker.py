"""What a worker process calls to run a sync reward: one reward a process, started once.

Scores leave it as plain dicts, whatever the reward returned or raised.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import pickle
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lit_grpo.rewards.reward import Reward
from lit_grpo.rewards.scoring.boundary import as_score, as_scores, failed_scores
from lit_grpo.types import Completion, Prompt, Score

_reward: Reward
_loop = asyncio.new_event_loop()


def start(pickled: bytes) -> None:
    """Takes the reward and starts it; it is closed when this process ends in order."""
    global _reward
    _reward = pickle.loads(pickled)
    _finish(_reward.start())
    atexit.register(lambda: _finish(_reward.close()))


def check(prompts: Sequence[Prompt]) -> str | None:
    """Why the reward refuses the prompts, if it does."""
    try:
        _finish(_reward.check(prompts))
    except ValueError as error:
        return str(error)
    return None


def score(prompt: Prompt, completions: Sequence[Completion]) -> list[dict[str, Any]]:
    """The fields of one Score a completion; more than one completion for grouped rewards only."""
    begin = time.perf_counter()
    try:
        scores = _score(prompt, completions, begin)
    except BaseException as error:  # user code may raise anything, SystemExit too
        scores = failed_scores(error, len(completions), time.perf_counter() - begin)
    return [asdict(one) for one in scores]


def _score(prompt: Prompt, completions: Sequence[Completion], begin: float) -> tuple[Score, ...]:
    if _reward.is_grouped:
        result: object = _reward.score_group(prompt, completions)
        return as_scores(result, len(completions), time.perf_counter() - begin)
    result = _reward.score(prompt, completions[0])
    return (as_score(result, time.perf_counter() - begin),)


def _finish(hook: object) -> None:
    if inspect.iscoroutine(hook):
        _loop.run_until_complete(hook)
