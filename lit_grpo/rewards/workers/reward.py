"""Run a sync reward in worker processes, because it runs code, takes long or may crash."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_grpo.rewards.functions.reward import as_reward
from lit_grpo.rewards.reward import Reward, setting_key, started
from lit_grpo.rewards.reward_checks import check_settings
from lit_grpo.rewards.workers.pool import WorkerPool, WorkerStartError
from lit_grpo.types import Completion, Outcome, Prompt, Score, UserError, check_range

FUNCTIONS = Path(__file__).with_name("reward_worker.py")
OUTER_SETTINGS = ("weight", "on_error", "timeout_seconds", "num_retries")


class ProcessReward(Reward):
    """Run a sync reward in worker processes that can be killed.

    A call that exceeds the deadline is a timeout, and its worker is killed with all its child
    processes. A worker that crashes is an error with its exit code. Both affect only the
    completions of that call, and the worker is replaced. The workers end with the trainer, however
    it ends.

    The reward is pickled into each worker, and started, used and closed there. What cannot be
    pickled must be created in its ``start``. Its class must be in a module, such as a file of the
    working directory. It runs in the main thread of the process, prints to the trainer's stderr and
    has an empty stdin. What its ``observe`` returns is not collected. Workers are not a sandbox:
    code in them has the trainer's permissions and environment variables.

    Args:
        reward: The reward to run. Its name, its ``reasoning`` and its ``only_sources`` are used by
            default; its weight and its error handling are set on ``ProcessReward``.
        num_workers: Number of processes, and so of parallel calls. The first starts with the run,
            the others when they are needed.
        deadline_seconds: Timeout of one call of ``score`` or ``score_group`` in a worker, without
            the wait for a free worker, which ``timeout_seconds`` includes.
        max_memory_gb: GiB that one process may allocate before it gets a MemoryError; null for no
            limit.
    """

    def __init__(
        self,
        reward: Reward,
        num_workers: int = 2,
        deadline_seconds: float = 30.0,
        max_memory_gb: float | None = 4.0,
        *,
        name: str | None = None,
        **settings: Any,
    ) -> None:
        reward = as_reward(reward, setting_key(self, "reward"))
        self.reasoning = reward.reasoning
        self.only_sources = reward.only_sources
        super().__init__(name=name or reward.name, **settings)
        self.reward = reward
        self.num_workers = num_workers
        self.deadline_seconds = deadline_seconds
        self.max_memory_gb = max_memory_gb
        check_range(setting_key(self, "num_workers"), num_workers, at_least=1)
        check_range(setting_key(self, "deadline_seconds"), deadline_seconds, above=0)
        check_range(setting_key(self, "max_memory_gb"), max_memory_gb, above=0)
        _check_inner(reward)
        self._pool: WorkerPool | None = None

    @property
    def is_grouped(self) -> bool:
        return self.reward.is_grouped

    @property
    def siblings_per_call(self) -> int | None:
        return self.reward.siblings_per_call

    async def start(self) -> None:
        """Start the first worker and the reward in it.

        Raises:
            UserError: the reward cannot be pickled, or imported or started in the worker.
        """
        self._pool = WorkerPool(
            FUNCTIONS,
            ("start", _pickle(self.reward)),
            num_workers=self.num_workers,
            deadline_seconds=self.deadline_seconds,
            max_memory_gb=self.max_memory_gb,
        )
        try:
            await self._pool.start()
        except WorkerStartError as error:
            raise UserError(
                f"reward {self.name} must start in a worker process, but {error}. Define it in a "
                "module that can be imported (not in the script that is run), and set what its "
                "start reads: a worker has the environment variables of this process."
            ) from error

    async def check(self, prompts: Sequence[Prompt]) -> None:
        """Let the reward check the data, in a worker.

        Raises:
            UserError: the reward raised a ValueError.
        """
        pool = started(self._pool, self)
        if objection := await pool.call("check", tuple(prompts), has_deadline=False):
            raise UserError(objection)

    async def score(self, prompt: Prompt, completion: Completion) -> Score:
        (score,) = await self.score_group(prompt, (completion,))
        return score

    async def score_group(
        self, prompt: Prompt, completions: Sequence[Completion]
    ) -> tuple[Score, ...]:
        scores = await started(self._pool, self).call("score", prompt, tuple(completions))
        return tuple(map(_score, scores))

    async def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()


def _check_inner(reward: Reward) -> None:
    check_settings(reward)
    if reward.is_async:
        raise UserError(
            f"reward must be sync to run in a worker process; {reward.name} is async (it runs on "
            "the event loop and blocks nothing). List it under rewards without ProcessReward, or "
            "define its score without async."
        )
    if type(reward).state_dict is not Reward.state_dict:
        raise UserError(
            f"reward must have no state in checkpoints; {reward.name} has state_dict (each worker "
            "would have its own state, lost when the worker is replaced). List it under rewards "
            "without ProcessReward."
        )
    for setting in OUTER_SETTINGS:
        if getattr(reward, setting) != getattr(Reward, setting):
            raise UserError(
                f"{setting} must be set on ProcessReward, got {getattr(reward, setting)!r} on its "
                f"reward {reward.name} (it has no effect there). Move {setting} to the init_args "
                "of ProcessReward."
            )


def _pickle(reward: Reward) -> bytes:
    try:
        return pickle.dumps(reward)
    except Exception as error:  # objects may raise anything while they are pickled
        raise UserError(
            f"reward must be picklable to run in a worker process; {reward.name} is not "
            f"({type(error).__name__}: {error}). Create clients, locks and open files in its "
            "start, and define functions and classes at the top level of a module."
        ) from error


def _score(fields: Mapping[str, Any]) -> Score:
    steps = tuple((index, value) for index, value in fields["steps"])
    return Score(**{**fields, "outcome": Outcome(fields["outcome"]), "steps": steps})
