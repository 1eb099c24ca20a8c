"""The scores of one rollout step, as they come in while others are still generated.

It hands out calls, waits and collects; threads, event loop and warnings are the suite's.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lit_grpo.rewards.reward import Reward
from lit_grpo.rewards.scoring.combine import combine
from lit_grpo.rewards.scoring.runners import Call
from lit_grpo.types import Completion, Group, Outcome, Prompt, RolloutBatch, Score, UserError

if TYPE_CHECKING:
    from lit_grpo.rewards.scoring.suite import RewardSuite

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
        self._loop = suite.started_loop()
        self._is_cancelled = False

    def add(self, row: int, completion: Completion) -> None:
        """Schedules the scoring of a completion and returns at once.

        One that failed has no score, and no part in a group that is scored together.
        """
        if self._completions[row] is not None:
            raise UserError(f"row {row} was added twice (each completion is scored once)")
        self._completions[row] = completion
        group = row // self._group_size
        self._missing[group] -= 1
        rows = () if completion.is_failed else (row,)
        for reward in self._suite.rewards:
            if completion.is_failed:
                absent = Outcome.NOT_SAMPLED
                score = Score(value=None, outcome=absent, detail=completion.failure)
                self._fill(reward.name, {row: score})
            self._take(reward, group, rows, is_last=not self._missing[group])
        self._suite.expire()

    def _take(self, reward: Reward, group: int, rows: Sequence[int], *, is_last: bool) -> None:
        waiting = self._siblings[reward.name, group]
        waiting.extend(rows)
        size = reward.siblings_per_call if reward.is_grouped else 1
        if waiting and (is_last or len(waiting) == size):
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
                self._changed.wait(min(left, self._suite.expire() or left))
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
                    rows = [row for row in self._rows(group) if not self._added(row).is_failed]
                with self._changed:
                    for row in rows:
                        self._scores[reward.name][row] = None
                    self._num_pending += len(rows)
                for row in rows:
                    self._take(reward, group, (row,), is_last=row == rows[-1])

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
        return self._is_cancelled or not self._suite.is_running(self._loop)

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
            self._suite.warn(call, failed)
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
        self._suite.schedule(call)

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
