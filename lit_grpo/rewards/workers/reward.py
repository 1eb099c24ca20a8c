"""Any sync reward in processes of its own: one that runs code, computes long or may crash.

It moves calls and scores between the processes; what a completion is worth says the reward.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_grpo.rewards.reward import Reward, check_settings
from lit_grpo.rewards.workers.pool import WorkerPool, WorkerStartError, check_positive
from lit_grpo.types import Completion, Outcome, Prompt, Score, UserError

FUNCTIONS = Path(__file__).with_name("reward_worker.py")
OUTER_SETTINGS = ("weight", "on_error", "timeout_seconds", "num_retries")


class ProcessReward(Reward):
    """Runs a sync reward in worker processes that can be killed.

    A call over the deadline is a timeout: its worker and every process that this started are
    killed. A worker that crashes is an error with its exit code. Neither has a value, both cost
    the sample that was scored only, and the worker is replaced. With the trainer, however it
    ends, the workers end too.

    The reward is pickled into each worker and started, used and closed there, so it makes in
    ``start`` what cannot be pickled. Its class must be in a module, such as a file of the working
    directory. It runs in the main thread of its process, prints to the trainer's stderr and reads
    an empty stdin. What its ``observe`` would tell stays in the workers. They are no sandbox: code
    that they run has the trainer's rights, environment variables included.

    Args:
        reward: the reward to run, which lends its name. Its weight and what becomes of its
            failures are set here, beside it.
        num_workers: processes, and so calls, side by side. The first starts with the run, the
            others when needed.
        deadline_seconds: for one call of ``score`` or ``score_group``, from when a worker takes
            it; ``timeout_seconds`` would count the wait for a worker, too.
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
        super().__init__(name=name or reward.name, **settings)
        self.reward = reward
        self.num_workers = num_workers
        self.deadline_seconds = deadline_seconds
        self.max_memory_gb = max_memory_gb
        check_positive(self, "num_workers", "deadline_seconds", "max_memory_gb")
        _check_inner(reward)
        self._pool: WorkerPool | None = None

    @property
    def is_grouped(self) -> bool:
        return self.reward.is_grouped

    @property
    def siblings_per_call(self) -> int | None:
        return self.reward.siblings_per_call

    async def start(self) -> None:
        """Starts a first worker, and the reward in it.

        Raises:
            ValueError: the reward cannot be pickled.
            RuntimeError: the reward could not be imported or started in the worker.
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
            raise RuntimeError(
                f"reward {self.name} must start in a process of its own, {error}. Define it in a "
                "module that can be imported (not in the script that is run), and see that its "
                "start works there."
            ) from error

    async def check(self, prompts: Sequence[Prompt]) -> None:
        """Lets the reward look at the data, in a worker.

        Raises:
            ValueError: what the reward says against it.
        """
        pool = self._started_pool()
        if refusal := await pool.call("check", tuple(prompts), has_deadline=False):
            raise UserError(refusal)

    async def score(self, prompt: Prompt, completion: Completion) -> Score:
        (score,) = await self.score_group(prompt, (completion,))
        return score

    async def score_group(
        self, prompt: Prompt, completions: Sequence[Completion]
    ) -> tuple[Score, ...]:
        scores = await self._started_pool().call("score", prompt, tuple(completions))
        return tuple(map(_score, scores))

    async def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()

    def _started_pool(self) -> WorkerPool:
        if self._pool is None:
            raise RuntimeError(f"{self.name} is not started; call start() of its suite first")
        return self._pool


def _check_inner(reward: Reward) -> None:
    check_settings(reward)
    if reward.is_async:
        raise UserError(
            f"reward must be sync to run in a process of its own, {reward.name} is async (it waits "
            "on the event loop and blocks nothing). List it under rewards without ProcessReward, "
            "or define its score without async."
        )
    if type(reward).state_dict is not Reward.state_dict:
        raise UserError(
            f"reward must have no state that a checkpoint holds, {reward.name} has state_dict (its "
            "workers would each have their own, lost when one is replaced). List it under rewards "
            "without ProcessReward."
        )
    for setting in OUTER_SETTINGS:
        if getattr(reward, setting) != getattr(Reward, setting):
            raise UserError(
                f"{setting} must be set on ProcessReward, got {getattr(reward, setting)!r} on its "
                f"reward {reward.name} (which has no say in it). Move {setting} to the init_args "
                "of ProcessReward."
            )


def _pickle(reward: Reward) -> bytes:
    try:
        return pickle.dumps(reward)
    except Exception as error:  # pickle lets out whatever the objects raise
        raise UserError(
            f"reward must be an object that pickle can carry into another process, {reward.name} "
            f"is not ({type(error).__name__}: {error}). Make clients, locks and open files in its "
            "start, and define functions and classes at the top of a module."
        ) from error


def _score(fields: Mapping[str, Any]) -> Score:
    return Score(**{**fields, "outcome": Outcome(fields["outcome"])})
