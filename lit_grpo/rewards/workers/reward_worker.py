"""The functions of a worker process that runs one sync reward.

They return scores as plain dicts, whatever the reward returned or raised.
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
from lit_grpo.rewards.scoring.boundary import as_permanent, as_score, as_scores, failed_scores
from lit_grpo.types import Completion, Prompt, Score

_reward: Reward
_loop = asyncio.new_event_loop()


def start(pickled: bytes) -> None:
    """Unpickle and start the reward; it is closed when this process exits normally."""
    global _reward
    _reward = pickle.loads(pickled)
    _finish(_reward.start())
    atexit.register(lambda: _finish(_reward.close()))


def check(prompts: Sequence[Prompt]) -> str | None:
    """Return why the reward refuses the prompts, or None if it accepts them."""
    try:
        _finish(_reward.check(prompts))
    except ValueError as error:
        return str(error)
    return None


def score(prompt: Prompt, completions: Sequence[Completion]) -> list[dict[str, Any]]:
    """Return the fields of one ``Score`` per completion; only a grouped reward gets several."""
    start_time = time.perf_counter()
    try:
        scores = _score(prompt, completions, start_time)
    except BaseException as error:  # user code may raise anything, even SystemExit
        if isinstance(error, MemoryError):
            error.add_note("A worker may allocate at most max_memory_gb of its ProcessReward.")
        scores = failed_scores(error, len(completions), time.perf_counter() - start_time)
    return [asdict(one) for one in as_permanent(scores)]


def _score(
    prompt: Prompt, completions: Sequence[Completion], start_time: float
) -> tuple[Score, ...]:
    if _reward.is_grouped:
        result: object = _reward.score_group(prompt, completions)
        seconds = time.perf_counter() - start_time
        return as_scores(result, len(completions), seconds, _reward.scorer)
    result = _reward.score(prompt, completions[0])
    return (as_score(result, time.perf_counter() - start_time, _reward.scorer),)


def _finish(result: object) -> None:
    """Run what an async hook returned to its end."""
    if inspect.iscoroutine(result):
        _loop.run_until_complete(result)
