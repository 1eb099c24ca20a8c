"""Held-out accuracy: of greedy completions, and mean and pass@k of sampled ones.

It does not depend on the reward that is trained on. A completion without a score is excluded from
the accuracy, never counted as wrong, and logged as ``val/unscored_fraction``, or if it was sampled
as ``val/unscored_fraction@n``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import comb

import torch
from torch import Tensor

from lit_grpo.distributed.ranks import any_failure
from lit_grpo.rewards import MathReward, Reward
from lit_grpo.rewards.functions.reward import RewardOrFunction, Rewards, as_reward
from lit_grpo.rewards.scoring.scoring import Scoring
from lit_grpo.rewards.scoring.suite import RewardSuite
from lit_grpo.rollout import EngineFailed, RolloutEngine, Sampling
from lit_grpo.training.collecting.checked_engine import generate
from lit_grpo.training.collecting.pending_rollout import PendingRollout, with_unfinished_tokens
from lit_grpo.training.collecting.score_status import ScoreStatus, score_status
from lit_grpo.training.metrics import Metrics, add_measurements
from lit_grpo.training.waiting import StepAbandoned, Wait, wait_until_done
from lit_grpo.types import (
    Prompt,
    RolloutBatch,
    StageProgress,
    UserCodeFailed,
    UserError,
    check_range,
    setting_error,
)
from lit_grpo.types.errors import EngineBug
from lit_grpo.types.field_types import check_value
from lit_grpo.types.keywords import checks_keywords

ACCURACY = "val/accuracy"
UNSCORED = "val/unscored_fraction"
"""The share of greedy completions whose accuracy is not known."""
_KEY = "model.evaluation.accuracy"
_ROUNDING = 1e-6
"""How far outside 0 to 1 an accuracy may be: a mean of several values is rounded."""


@checks_keywords
@dataclass(kw_only=True)
class Evaluation:
    """How accuracy on held-out prompts is measured.

    Args:
        accuracy: The reward that scores correctness from 0 to 1, or several for different sources
            of a mixture; null uses ``MathReward``. ``val/accuracy`` is its mean; ``val/pass@k``
            counts only the value 1 as right.
        num_samples: Completions per prompt at the training temperature, for ``val/avg@n`` and
            ``val/pass@k``; 0 measures greedy accuracy only.
        pass_at: Values of k for ``val/pass@k``, from 1 to ``num_samples``; null uses
            ``num_samples``.
        before_training: Evaluate once before the first step.

    Raises:
        UserError: ``num_samples`` is negative, a k is not from 1 to ``num_samples``, or two of the
            rewards are for one source.
    """

    accuracy: RewardOrFunction | Rewards | None = None
    num_samples: int = 0
    pass_at: tuple[int, ...] | None = None
    before_training: bool = True

    def __post_init__(self) -> None:
        check_value("model.evaluation.num_samples", self.num_samples, int)
        check_value("model.evaluation.pass_at", self.pass_at, tuple[int, ...] | None)
        check_range(
            "model.evaluation.num_samples",
            self.num_samples,
            at_least=0,
            why="0 measures greedy accuracy only",
        )
        if not all(1 <= k <= self.num_samples for k in self.pass_at or ()):
            raise setting_error(
                "model.evaluation.pass_at",
                f"from 1 to num_samples = {self.num_samples}",
                list(self.pass_at or ()),
                "pass@k is estimated from at least k samples",
            )
        given = MathReward() if self.accuracy is None else self.accuracy
        accuracies = given if isinstance(given, list | tuple) else [given]
        self.suite = RewardSuite(
            [as_reward(one, _KEY) for one in accuracies],
            key=_KEY,
            failures_metric=" or ".join(self.unscored_names.values()),
        )
        _check_sources(self.suite.rewards)
        self.progress: Callable[[], StageProgress] = StageProgress
        """Returns how many completions of the current batch have been scored."""
        self._has_worked = False

    def metric_names(self, prompts: Sequence[Prompt]) -> list[str]:
        """Return the names of the metrics that an evaluation of these prompts logs.

        A judge, or a reward that measures something, adds its own: see ``measures_more``.
        """
        sources = sorted({prompt.source for prompt in prompts if prompt.source})
        by_source = [f"val/{source}/accuracy" for source in sources]
        return [*self.accuracy_names, *by_source, *self.unscored_names.values(), "val/mean_length"]

    @property
    def measures_more(self) -> bool:
        """Whether the accuracy logs metrics of names that only it knows."""
        return any(type(one).observe is not Reward.observe for one in self.suite.rewards)

    @property
    def accuracy_names(self) -> list[str]:
        """Names of the accuracies that an evaluation logs."""
        n = self.num_samples
        samples = [f"val/avg@{n}", *(f"val/pass@{k}" for k in self.pass_at or (n,))] if n else []
        return [ACCURACY, *samples]

    @property
    def unscored_names(self) -> dict[str, str]:
        """Name of an accuracy -> name of the share of completions for which it is not known."""
        n = self.num_samples
        return {ACCURACY: UNSCORED} | ({f"val/avg@{n}": f"{UNSCORED}@{n}"} if n else {})

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Check that the accuracy can score these prompts.

        Raises:
            UserError: it cannot.
        """
        try:
            self.suite.check(prompts)
        except ValueError as error:
            if self.accuracy is not None:
                raise
            raise UserError(
                f"{error} These are validation prompts, whose accuracy is measured by MathReward. "
                "If they have no such answers, set model.evaluation.accuracy to a reward."
            ) from error

    def describe_coverage(self, prompts: Sequence[Prompt], sources: Sequence[str]) -> str:
        """Return which sources of a mixture the accuracy covers; empty if it covers all or none.

        Args:
            prompts: The validation's.
            sources: The sources that are trained on.
        """
        rewards = self.suite.rewards
        covered = {one.source for one in prompts if any(r.applies_to(one) for r in rewards)}
        absent = [source for source in sources if source not in covered]
        if not absent or len(absent) == len(sources):
            return ""
        of_all = ", ".join(source for source in sources if source in covered)
        return (
            f"val/accuracy covers {of_all}, and not {', '.join(absent)} (no held-out prompts, or "
            f"{_KEY} is not for them)"
        )

    def add_metrics(
        self,
        metrics: Metrics,
        engine: RolloutEngine,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        seed: int,
        until_done: Callable[[Wait], None] = wait_until_done,
    ) -> None:
        """Sample and score completions of these prompts, and add their ``val/…`` metrics.

        Every rank must call this.

        Args:
            until_done: Waits for completions and scores on every rank.

        Raises:
            EngineFailed: the engine of any rank cannot sample them.
            UserCodeFailed: the accuracy has a bug or returns something that is not a number, or
                the engine of any rank has a bug (`EngineBug`).
            StepAbandoned: a callback ended the run during the wait.
        """

        def sample(group_size: int, sampling: Sampling) -> RolloutBatch:
            scoring = self.suite.open(prompts, group_size)
            self.progress = lambda: with_unfinished_tokens(scoring.scored(), engine)
            pending = PendingRollout(
                prompts,
                scoring,
                lambda: generate(engine, prompts, group_size, sampling, seed=seed),
                samples_in_thread=engine.overlaps_updates,
            )
            return self._score(scoring, pending, until_done)

        greedy = sample(1, replace(sampling, temperature=0.0))
        values = _values(greedy)
        accuracies = self.suite.rewards
        is_asked = torch.tensor(
            [any(a.applies_to(prompt) for a in accuracies) for prompt in prompts]
        )
        self._add_accuracy(metrics, ACCURACY, values, is_asked)
        for prompt, value in zip(prompts, values, strict=True):
            if prompt.source:
                metrics.add_all(f"val/{prompt.source}/accuracy", value[~value.isnan()])
        metrics.add_all("val/mean_length", [float(len(c.token_ids)) for c in greedy.sampled])
        if self.num_samples:
            values = _values(sample(self.num_samples, sampling))
            self._add_accuracy(metrics, f"val/avg@{self.num_samples}", values, is_asked)
            for k in self.pass_at or (self.num_samples,):
                metrics.add_all(f"val/pass@{k}", _pass_at(k, values))
        for measured in self.suite.observe():
            add_measurements(metrics, measured, prefix="val/")

    def _add_accuracy(self, metrics: Metrics, name: str, values: Tensor, is_asked: Tensor) -> None:
        """Add the mean of the [B, G] values that are known, and the share of unknown ones.

        Args:
            is_asked: [B] whether an accuracy is for this prompt.
        """
        metrics.add_all(name, values[~values.isnan()])
        metrics.add_all(self.unscored_names[name], values[is_asked].isnan().double())

    def _score(
        self, scoring: Scoring, pending: PendingRollout, until_done: Callable[[Wait], None]
    ) -> RolloutBatch:
        """Return the scored completions; what goes wrong on one rank is raised on all."""
        try:
            until_done(pending.sample_or_wait)
            if (failure := any_failure(pending.engine_failure)) is not None:
                raise failure
            until_done(scoring.wait)
        except (EngineFailed, EngineBug, StepAbandoned):
            pending.cancel()
            raise
        rollouts = scoring.result()
        bug = self._find_bug(score_status(rollouts, list(self.suite.weights)))
        if bug := any_failure(bug or _find_other_value(rollouts)):
            raise UserCodeFailed(bug)
        scoring.warn_of_bugs()
        return rollouts

    def _find_bug(self, status: ScoreStatus) -> str:
        """Describe why the accuracy, which has never worked, fails on every row, if by a bug."""
        never_worked = set() if self._has_worked else status.only_bugs
        self._has_worked |= bool(status.not_bugs)
        if not never_worked:
            return ""
        name = min(never_worked)
        return (
            f"the accuracy {name!r} has a bug. {status.bugs[name]}\nSet "
            "model.evaluation.accuracy, or fix it."
        )


def _values(rollouts: RolloutBatch) -> Tensor:
    """Return [B, G] values of the accuracy before its weight; NaN on rows without a score."""
    parts = [*rollouts.parts.values()]
    return reduce(lambda values, more: torch.where(values.isnan(), more, values), parts)


def _find_other_value(rollouts: RolloutBatch) -> str:
    """Describe the first value that is not an accuracy, and would be logged as one."""
    for group in rollouts.groups:
        for name, scores in group.scores.items():
            for value in (score.value for score in scores if score.value is not None):
                if not -_ROUNDING <= value <= 1 + _ROUNDING:
                    return (
                        f"the accuracy {name!r} must give values from 0 to 1, got {value:g} for "
                        f"row {group.prompt.id} (their mean is logged as val/accuracy, and pass@k "
                        "counts the value 1 as right). Return 1.0 for a completion that is right, "
                        "0.0 for one that is wrong, and None if that cannot be told. Or set "
                        f"{_KEY} to another reward."
                    )
    return ""


def _check_sources(accuracies: Sequence[Reward]) -> None:
    """Check that at most one of several accuracies says whether a completion is right."""
    sources = [source for one in accuracies for source in one.only_sources or ()]
    are_limited = all(one.only_sources for one in accuracies)
    if len(accuracies) > 1 and not (are_limited and len(set(sources)) == len(sources)):
        found = ", ".join(f"{one.name} for {one.only_sources or 'all'}" for one in accuracies)
        raise setting_error(_KEY, "rewards with different only_sources", found)


def _pass_at(k: int, values: Tensor) -> list[float]:
    """Estimate pass@k for every group of [B, G] with at least k scored samples."""
    estimates = []
    for group in values:
        num_right, num_scored = int((group == 1).sum()), int((~group.isnan()).sum())
        if num_scored >= k:
            estimates.append(pass_at_k(num_scored, num_right, k))
    return estimates


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Return the probability that at least one of k samples is right (an unbiased estimate).

    Source: Chen et al. 2021, arXiv 2107.03374 equation 1.
    """
    return 1 - comb(num_samples - num_right, k) / comb(num_samples, k)
