"""All rewards of a run: their start and end, the threads and the event loop that they run on.

What a failure means is said by each reward's ``on_error`` and by ``combine``. It never normalises:
advantages do.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lit_grpo.rewards.reward import Reward, check_settings
from lit_grpo.rewards.scoring.runners import AsyncRunner, Call, SyncRunner
from lit_grpo.rewards.scoring.scoring import Scoring
from lit_grpo.types import Completion, Measurements, Outcome, Prompt, RolloutBatch, Score, UserError

_log = logging.getLogger(__name__)


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
            raise UserError(
                f"rewards must have unique names, got {', '.join(sorted(repeated))} more than "
                "once (metrics go by name). Set name in the init_args of one."
            )
        if not any(reward.weight for reward in self.rewards):
            raise UserError(
                f"rewards must hold at least one with a weight other than 0, got "
                f"{names or 'none'} (nothing would be learned). Add a reward or set a weight."
            )
        self._loop: AsyncRunner | None = None
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
        self._loop = AsyncRunner()
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

    def observe(self) -> list[Measurements]:
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

    def expire(self) -> float | None:
        """Gives up on sync calls that overran; the seconds until the next one may, if any can."""
        waits = [seconds for runner in self._runners if (seconds := runner.expire()) is not None]
        return min(waits, default=None)

    def schedule(self, call: Call) -> None:
        self._submit[call.reward.name](call)

    def started_loop(self) -> AsyncRunner:
        """The loop of this start, which no later start has."""
        if self._loop is None:
            raise RuntimeError("the reward suite is not started; call start() first")
        return self._loop

    def is_running(self, loop: AsyncRunner) -> bool:
        return self._loop is loop

    def warn(self, call: Call, score: Score) -> None:
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
        loop = self.started_loop()
        if inspect.iscoroutinefunction(hook):
            loop.run(hook(*arguments))
        else:
            hook(*arguments)
