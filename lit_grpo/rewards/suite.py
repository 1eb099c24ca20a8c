"""All rewards of a run, scoring completions while the engine still generates others.

It schedules, waits and collects; what a failure means is said by each reward's ``on_error`` and
by ``combine``. It never normalises: advantages do.
"""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lit_grpo.rewards._combine import combine
from lit_grpo.rewards._runners import Call, LoopThread, SyncRunner
from lit_grpo.rewards.reward import Reward, check_settings
from lit_grpo.types import Completion, Group, Observed, Outcome, Prompt, RolloutBatch, Score

_log = logging.getLogger(__name__)

MAX_WAIT_SECONDS = threading.TIMEOUT_MAX


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

    def observe(self) -> list[Observed]:
        """What each reward measured since the last call."""
        return [reward.observe() for reward in self.rewards]

    def state_dict(self) -> dict[str, Any]:
        """What each reward wants kept, by name; every rank must call this."""
        return {reward.name: reward.state_dict() for reward in self._running}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Gives each running reward its state back."""
        for reward in self._running:
            if reward.name in state:
                reward.load_state_dict(state[reward.name])

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
        self._siblings: dict[tuple[str, int], list[int]] = defaultdict(list)
        """(reward, group) -> rows that wait for others to be scored with."""
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
            self._take(reward, group, row, is_last=not self._missing[group])
        self._suite._expire()

    def _take(self, reward: Reward, group: int, row: int, *, is_last: bool) -> None:
        waiting = self._siblings[reward.name, group]
        waiting.append(row)
        size = reward.siblings_per_call if reward.is_grouped else 1
        if is_last or len(waiting) == size:
            self._submit(reward, tuple(sorted(waiting)))
            waiting.clear()

    def wait(self, seconds: float = MAX_WAIT_SECONDS) -> bool:
        """Whether ``result`` has nothing to wait for, now or within these seconds."""
        self._refuse_unready()
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._num_pending and self._failure is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, self._suite._expire() or left))
        return True

    def result(self) -> RolloutBatch:
        """Waits for the scores that are still missing.

        Raises:
            RewardFailed: a reward with ``on_error="raise"`` failed.
        """
        self.wait()
        if self._failure is not None:
            self.cancel()
            raise self._failure
        return combine(self._suite.rewards, map(self._group, range(len(self._prompts))))

    def expire(self, seconds: float) -> None:
        """Gives up on every score that is still missing after these seconds of waiting."""
        detail = f"no score within {seconds:g} s after generation (score_deadline_seconds)"
        late = Score(value=None, outcome=Outcome.TIMEOUT, detail=detail)
        for reward in self._suite.rewards:
            self._fill(reward.name, dict.fromkeys(range(len(self._completions)), late))

    def ask_again(self) -> None:
        """Scores once more what failed for another reason than the completion's own."""
        for reward in self._suite.rewards:
            for group in range(len(self._prompts)):
                rows = [row for row in self._rows(group) if self._is_outage(reward.name, row)]
                if rows and reward.is_grouped and reward.siblings_per_call is None:
                    rows = list(self._rows(group))
                with self._changed:
                    for row in rows:
                        self._scores[reward.name][row] = None
                    self._num_pending += len(rows)
                for row in rows:
                    self._take(reward, group, row, is_last=row == rows[-1])

    def _is_outage(self, name: str, row: int) -> bool:
        score = self._scores[name][row]
        return score is not None and score.is_outage

    def _refuse_unready(self) -> None:
        if self.is_cancelled:
            raise RuntimeError("this scoring was cancelled, so it has no result")
        if any(self._missing):
            rows = [row for row, one in enumerate(self._completions) if one is None]
            raise RuntimeError(f"rows {rows[:8]} were never added, so they have no scores")

    @property
    def counted_rewards(self) -> list[str]:
        """The names of those that have a weight in the sum."""
        return [name for name, weight in self._suite.weights.items() if weight]

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
        failed = next((score for score in scores if score.is_failure), None)
        if failed is not None:
            self._suite._warn(call, failed)
            if call.reward.on_error == "raise" and self._failure is None:
                self._failure = RewardFailed(call.reward.name, call.prompt.id, failed)
        self._fill(call.reward.name, dict(zip(call.rows, scores, strict=True)))

    def _fill(self, name: str, scores: Mapping[int, Score]) -> None:
        """Enters scores where there are none yet; what comes too late is dropped."""
        slots = self._scores[name]
        with self._changed:
            for row, score in scores.items():
                if slots[row] is None:
                    slots[row] = score
                    self._num_pending -= 1
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
