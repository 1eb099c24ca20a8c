"""All rewards of a run, scoring completions while the engine still generates others.

It schedules, waits and collects; what a failure means is said by each reward's ``on_error`` and
by ``combine``. It never normalises: advantages do.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from lit_grpo.rewards._boundary import is_failure
from lit_grpo.rewards._combine import combine
from lit_grpo.rewards._runners import Call, LoopThread, SyncRunner
from lit_grpo.rewards.reward import Reward, check_settings
from lit_grpo.types import Completion, Group, Outcome, Prompt, RolloutBatch, Score

_log = logging.getLogger(__name__)


class RewardFailed(RuntimeError):
    """A reward whose ``on_error`` is ``raise`` gave no value."""

    def __init__(self, reward: str, prompt_id: str, score: Score) -> None:
        super().__init__(
            f"reward {reward} failed on prompt {prompt_id} with outcome {score.outcome}: "
            f"{score.detail or 'no detail'} (its on_error is 'raise'). Mend the reward, or set "
            "on_error to 'mask' to train without the rows that it cannot score."
        )
        self.reward = reward
        self.prompt_id = prompt_id
        self.outcome = score.outcome
        self.detail = score.detail


class RewardSuite:
    """Runs the rewards of a run; started once, then one ``Scoring`` a rollout step.

    Raises:
        ValueError: no reward, two of one name, none with a weight, or a setting out of range.
    """

    def __init__(self, rewards: Sequence[Reward]) -> None:
        self.rewards = tuple(rewards)
        for reward in self.rewards:
            check_settings(reward)
        names = [reward.name for reward in self.rewards]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise ValueError(
                f"rewards must have unique names, got {', '.join(sorted(repeated))} more than "
                "once (metrics go by name). Set name in the init_args of one."
            )
        if not any(reward.weight for reward in self.rewards):
            raise ValueError(
                f"rewards must hold at least one with a weight other than 0, got "
                f"{names or 'none'} (nothing would be learned). Add a reward or set a weight."
            )
        self._loop: LoopThread | None = None
        self._running: list[Reward] = []
        self._runners: list[SyncRunner] = []
        self._submit: dict[str, Callable[[Call], None]] = {}
        self._warned: set[tuple[str, Outcome]] = set()

    @property
    def weights(self) -> dict[str, float]:
        """name -> weight in the sum."""
        return {reward.name: reward.weight for reward in self.rewards}

    def start(self) -> None:
        """Starts the threads and then the rewards; does nothing when started already."""
        if self._loop is not None:
            return
        self._loop = LoopThread()
        for reward in self.rewards:
            if reward.is_async:
                self._submit[reward.name] = self._loop.submit
            else:
                self._runners.append(SyncRunner(reward, self._loop))
                self._submit[reward.name] = self._runners[-1].submit
        try:
            for reward in self.rewards:
                self._call(reward.start)
                self._running.append(reward)
        except BaseException:
            self.close()
            raise

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Lets every reward look at the data before training.

        Raises:
            ValueError: prompts that a reward can never score.
        """
        for reward in self.rewards:
            self._call(reward.check, prompts)

    def open(self, prompts: Sequence[Prompt], group_size: int) -> Scoring:
        """The scoring of one rollout step: ``group_size`` completions for each prompt."""
        return Scoring(self, prompts, group_size)

    def score(
        self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]
    ) -> RolloutBatch:
        """Scores finished groups: ``completions[b]`` are the G of ``prompts[b]``."""
        scoring = self.open(prompts, len(completions[0]))
        for row, completion in enumerate(one for group in completions for one in group):
            scoring.add(row, completion)
        return scoring.result()

    def close(self) -> None:
        """Cancels what is pending and closes the rewards, within about 2 seconds."""
        if self._loop is None:
            return
        loop, self._loop = self._loop, None
        for runner in self._runners:
            runner.close()
        hooks = [reward.close for reward in self._running]
        for hook in (hook for hook in hooks if not inspect.iscoroutinefunction(hook)):
            try:
                hook()
            except Exception:
                _log.warning("a reward did not close cleanly", exc_info=True)
        loop.close([hook for hook in hooks if inspect.iscoroutinefunction(hook)])
        self._running.clear()
        self._runners.clear()
        self._submit.clear()

    def __enter__(self) -> RewardSuite:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _expire(self) -> float | None:
        """Gives up on sync calls that overran; the seconds until the next one may, if any can."""
        waits = [seconds for runner in self._runners if (seconds := runner.expire()) is not None]
        return min(waits, default=None)

    def _schedule(self, call: Call) -> None:
        self._submit[call.reward.name](call)

    def _started_loop(self) -> LoopThread:
        """The loop of this start, which no later start has."""
        if self._loop is None:
            raise RuntimeError("the reward suite is not started; call start() first")
        return self._loop

    def _is_running(self, loop: LoopThread) -> bool:
        return self._loop is loop

    def _warn(self, call: Call, score: Score) -> None:
        """Says the first failure of each kind; metrics count the rest."""
        kind = (call.reward.name, score.outcome)
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning(
                "reward %r gave no value for prompt %s: %s: %s (said once; "
                "reward/%s/%s_fraction counts them)",
                *(kind[0], call.prompt.id, score.outcome, score.detail, *kind),
            )

    def _call(self, hook: Callable[..., Any], *arguments: Any) -> None:
        loop = self._started_loop()
        if inspect.iscoroutinefunction(hook):
            loop.run(hook(*arguments))
        else:
            hook(*arguments)


class Scoring:
    """The scores of one rollout step, B prompts of G completions, as they come in."""

    def __init__(self, suite: RewardSuite, prompts: Sequence[Prompt], group_size: int) -> None:
        self._suite = suite
        self._prompts = tuple(prompts)
        self._group_size = group_size
        num_rows = len(self._prompts) * group_size
        self._completions: list[Completion | None] = [None] * num_rows
        self._scores: dict[str, list[Score | None]] = {
            reward.name: [None] * num_rows for reward in suite.rewards
        }
        self._missing = [group_size] * len(self._prompts)
        self._num_pending = num_rows * len(suite.rewards)
        self._failure: RewardFailed | None = None
        self._changed = threading.Condition()
        self._loop = suite._started_loop()
        self._is_cancelled = False

    def add(self, row: int, completion: Completion) -> None:
        """Schedules the scoring of a completion and returns at once."""
        if self._completions[row] is not None:
            raise ValueError(f"row {row} was added twice (each completion is scored once)")
        self._completions[row] = completion
        group = row // self._group_size
        self._missing[group] -= 1
        for reward in self._suite.rewards:
            if not reward.is_grouped:
                self._submit(reward, (row,))
            elif not self._missing[group]:
                self._submit(reward, tuple(self._rows(group)))
        self._suite._expire()

    def result(self) -> RolloutBatch:
        """Waits for the scores that are still missing.

        Raises:
            RewardFailed: a reward with ``on_error="raise"`` failed.
        """
        if self.is_cancelled:
            raise RuntimeError("this scoring was cancelled, so it has no result")
        if any(self._missing):
            rows = [row for row, one in enumerate(self._completions) if one is None]
            raise RuntimeError(f"rows {rows[:8]} were never added, so they have no scores")
        with self._changed:
            while self._num_pending and self._failure is None:
                self._changed.wait(self._suite._expire())
        if self._failure is not None:
            self.cancel()
            raise self._failure
        return combine(self._suite.rewards, map(self._group, range(len(self._prompts))))

    def cancel(self) -> None:
        """Forgets the step: what was not begun is not scored."""
        self._is_cancelled = True

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled or not self._suite._is_running(self._loop)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds spent scoring so far by reward; more than the wall clock when side by side."""
        return {
            name: sum(score.seconds for score in scores if score is not None)
            for name, scores in self._scores.items()
        }

    def deliver(self, call: Call, scores: tuple[Score, ...]) -> None:
        """Takes the scores of a call, on whichever thread made it."""
        failed = next(filter(is_failure, scores), None)
        if failed is not None:
            self._suite._warn(call, failed)
        slots = self._scores[call.reward.name]
        for row, score in zip(call.rows, scores, strict=True):
            slots[row] = score
        with self._changed:
            self._num_pending -= len(scores)
            if failed is not None and call.reward.on_error == "raise" and self._failure is None:
                self._failure = RewardFailed(call.reward.name, call.prompt.id, failed)
            if not self._num_pending or self._failure is not None:
                self._changed.notify_all()

    def _rows(self, group: int) -> range:
        return range(group * self._group_size, (group + 1) * self._group_size)

    def _submit(self, reward: Reward, rows: tuple[int, ...]) -> None:
        call = Call(
            reward=reward,
            receiver=self,
            prompt=self._prompts[rows[0] // self._group_size],
            rows=rows,
            completions=tuple(self._added(row) for row in rows),
        )
        self._suite._schedule(call)

    def _added(self, row: int) -> Completion:
        completion = self._completions[row]
        assert completion is not None
        return completion

    def _group(self, group: int) -> Group:
        rows = self._rows(group)
        scores = {}
        for name, slots in self._scores.items():
            scores[name] = tuple(score for row in rows if (score := slots[row]) is not None)
        return Group(
            prompt=self._prompts[group],
            completions=tuple(self._added(row) for row in rows),
            scores=scores,
        )
