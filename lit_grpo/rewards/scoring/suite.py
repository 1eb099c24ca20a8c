"""Start and close all rewards of a run, and open the scoring of each rollout step.

Scores are summed with their weights; normalising is left to the advantages.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakSet

from lit_grpo.rewards.functions.reward import as_reward
from lit_grpo.rewards.reward import Reward, setting_key
from lit_grpo.rewards.reward_checks import check_settings
from lit_grpo.rewards.scoring.reasoning import Reasoning
from lit_grpo.rewards.scoring.runners import Call, Runners
from lit_grpo.rewards.scoring.scoring import Scoring
from lit_grpo.types import (
    Completion,
    Measurements,
    Outcome,
    Prompt,
    RankLost,
    RolloutBatch,
    Score,
    UserCodeFailed,
    UserError,
    setting_error,
)
from lit_grpo.types.functions import users_traceback
from lit_grpo.types.saved_state import saved_state
from lit_grpo.types.spelling import did_you_mean

_log = logging.getLogger(__name__)


class RewardSuite:
    """The rewards of a run. Start it once, then open one ``Scoring`` per rollout step.

    Args:
        rewards: Rewards, or functions to call as one.
        key: The setting that names them, for error messages.

    Raises:
        UserError: there is no reward, none with a weight, or two with one name, or a setting is
            out of range.
    """

    def __init__(
        self,
        rewards: Sequence[Reward | Callable[..., Any]],
        *,
        key: str = "rewards",
        failures_metric: str = "reward/{name}/{outcome}_fraction",
    ) -> None:
        self.rewards = tuple(map(as_reward, rewards))
        for reward in self.rewards:
            check_settings(reward)
        names = [reward.name for reward in self.rewards]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise UserError(
                f"{key} must have unique names, got {', '.join(sorted(repeated))} more than "
                "once (they name the metrics). Set name in the init_args of one; in Python, give "
                "FunctionReward(function, name=...) for a function."
            )
        if not any(reward.weight for reward in self.rewards):
            raise UserError(
                f"at least one reward must have a weight other than 0, got {names or 'none'} "
                "(otherwise nothing is learned). Add a reward or set a weight."
            )
        self._failures_metric = failures_metric
        self._runners: Runners | None = None
        self._reasoning: Reasoning | None = None
        self._started: list[Reward] = []
        self._before_step: dict[str, Any] = {}
        """States of rewards before the rollout step that runs."""
        self._open: WeakSet[Scoring] | None = None  # made when needed: it cannot be copied
        self._warned: set[tuple[str, Outcome, bool, tuple[str, ...]]] = set()

    @property
    def weights(self) -> dict[str, float]:
        """name -> weight in the sum."""
        return {reward.name: reward.weight for reward in self.rewards}

    def start(self, reasoning: Reasoning | None = None) -> None:
        """Start the threads and the rewards; do nothing if they are started already.

        Args:
            reasoning: Finds the answers of completions, for rewards with ``reasoning: strip``;
                None gives every reward the whole completion.

        Raises:
            UserError: a reward cannot start, or the tokenizer hides the tags of the reasoning.
            UserCodeFailed: the ``start`` of a reward has failed otherwise.
        """
        if self._runners is not None:
            return
        if reasoning is not None and any(one.reasoning == "strip" for one in self.rewards):
            reasoning.check()
        self._reasoning = reasoning
        self._runners = Runners(self.rewards)
        try:
            for reward in self.rewards:
                self._start(reward)
                self._started.append(reward)
        except BaseException:
            self.close()
            raise

    def _start(self, reward: Reward) -> None:
        try:
            self._running().run_hook(reward.start)
        except UserError:
            raise
        except Exception as error:
            raise UserCodeFailed(
                f"the start of reward {reward.name!r} failed:\n{users_traceback(error)}"
            ) from error

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Let every reward check its data before training.

        Raises:
            ValueError: a reward can never score some of the prompts.
            UserError: a checkpoint cannot hold the state of a reward.
        """
        for reward in self.rewards:
            self._running().run_hook(reward.check, reward.applicable_prompts(prompts))
        self.state_dict()

    def check_sources(self, sources: Sequence[str]) -> None:
        """Check that rewards and sources fit.

        Args:
            sources: The sources of the mixture; none without one.

        Raises:
            UserError: a reward names an unknown source, or has the name of a source; or a source
                has no reward with a weight.
        """
        self.check_only_sources(sources)
        for reward in self.rewards:
            if reward.name in sources:
                raise UserError(
                    f"a reward and a source must not have the same name, got {reward.name!r} (both "
                    "name metrics). Set name in the init_args of the reward."
                )
        for source in sources:
            if not any(
                one.weight and (one.only_sources is None or source in one.only_sources)
                for one in self.rewards
            ):
                raise UserError(
                    f"every source must have a reward with a weight, got none for {source!r} "
                    "(nothing would be learned from it). Add one, or name the source in its "
                    "only_sources."
                )

    def check_only_sources(self, sources: Sequence[str]) -> None:
        """Check that the sources that rewards name belong to the mixture.

        Raises:
            UserError: one is unknown, so its reward would score nothing.
        """
        rule = ", ".join(sources) or "no source, since the data is no mixture"
        for reward in self.rewards:
            if unknown := [one for one in reward.only_sources or () if one not in sources]:
                key = setting_key(reward, "only_sources")
                error = setting_error(key, f"sources of data.sources ({rule})", repr(unknown[0]))
                raise UserError(f"{error}{did_you_mean(unknown[0], sources)}")

    def open(self, prompts: Sequence[Prompt], group_size: int) -> Scoring:
        """Open the scoring of a rollout step with ``group_size`` completions for each prompt."""
        scoring = Scoring(
            *(self.rewards, self._running(), self._warn, self._reasoning), prompts, group_size
        )
        self._open = WeakSet() if self._open is None else self._open
        self._open.add(scoring)
        return scoring

    def num_unscored(self) -> dict[str, int]:
        """Return by reward how many completions wait for its score; omit rewards without any."""
        counts: Counter[str] = Counter()
        for scoring in [*(self._open or ())]:
            if not scoring.is_cancelled:
                counts.update(scoring.num_unscored())
        return dict(+counts)

    def score(
        self, prompts: Sequence[Prompt], completions: Sequence[Sequence[Completion]]
    ) -> RolloutBatch:
        """Score complete groups: ``completions[b]`` are the G completions of ``prompts[b]``."""
        scoring = self.open(prompts, len(completions[0]))
        scoring.add_all(enumerate(one for group in completions for one in group))
        rollouts = scoring.result()
        scoring.warn_of_bugs()
        return rollouts

    def observe(self) -> list[Measurements]:
        """Return what each reward measured since the last call."""
        return [reward.observe() for reward in self.rewards]

    def record_spending(self, run_dir: Path) -> None:
        """Let each started reward keep what it spends in the run's directory; on every rank."""
        for reward in self._started:
            reward.record_spending(run_dir)

    def begin_step(self) -> None:
        """Keep the states of rewards, which are saved if the rollout step is left undone."""
        for reward in self._started:
            has_state = type(reward).state_dict is not Reward.state_dict
            if has_state and not reward.outlasts_steps and reward.name not in self._before_step:
                self._before_step[reward.name] = self._state_of(reward)

    def end_step(self) -> None:
        """Count what the rollout step has scored as done."""
        self._before_step.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return name -> state of each started reward; every rank must call this.

        Within a rollout step, it is the state before the step.
        """
        now = [reward for reward in self._started if reward.name not in self._before_step]
        return self._before_step | {reward.name: self._state_of(reward) for reward in now}

    def _state_of(self, reward: Reward) -> Any:
        try:
            state = reward.state_dict()
        except (UserError, RankLost):
            raise
        except Exception as error:
            raise UserCodeFailed(
                f"the state_dict of reward {reward.name!r} failed:\n{users_traceback(error)}"
            ) from error
        return saved_state(f"rewards.{reward.name}", state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of each started reward."""
        self._before_step.clear()
        for reward in self._started:
            if reward.name in state:
                reward.load_state_dict(state[reward.name])

    def close(self) -> None:
        """Cancel what is pending and close the rewards, within about 2 seconds."""
        runners, self._runners = self._runners, None
        if runners is not None:
            runners.close([reward.close for reward in self._started])
            self._started.clear()
            self._before_step.clear()

    def __enter__(self) -> RewardSuite:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _running(self) -> Runners:
        if self._runners is None:
            raise RuntimeError("the reward suite is not started; call start() first")
        return self._runners

    def _warn(self, call: Call, score: Score) -> None:
        """Log the first failure of each kind; metrics count all.

        A bug is logged with its traceback, and those of other lines of code are of other kinds.
        """
        lines = tuple(re.findall(r'File ".*", line \d+', score.bug))
        kind = (call.reward.name, score.outcome, bool(score.bug), lines)
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning(
                "reward %r gave no value for prompt %s: %s: %s (logged once; %s counts them)",
                *(call.reward.name, call.prompt.id, score.outcome, score.detail),
                self._failures_metric.format(name=call.reward.name, outcome=score.outcome),
                extra={"traceback": score.bug},
            )
