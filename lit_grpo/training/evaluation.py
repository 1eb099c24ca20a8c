"""Held-out accuracy: greedy, and averaged and best over samples. Kept apart from the reward.

A completion that could not be judged has no vote and is counted; it is never a wrong answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import comb

from torch import Tensor

from lit_grpo.rewards import MathReward, Reward
from lit_grpo.rewards.scoring import RewardSuite
from lit_grpo.rollout import RolloutEngine, Sampling
from lit_grpo.training.metrics import Metrics, add_measurements
from lit_grpo.types import Prompt, RolloutBatch, UserError


@dataclass(kw_only=True)
class Evaluation:
    """How a policy is judged on held-out prompts.

    Args:
        accuracy: What says whether a completion is right, value 1 meaning so; ``MathReward`` when
            null.
        num_samples: Completions a prompt at the training temperature for ``val/avg@n`` and
            ``val/pass@k``; 0 for greedy accuracy only.
        pass_at: The k of ``val/pass@k``, at most ``num_samples``; null for that number itself.
        before_training: Evaluate once before the first step.

    Raises:
        ValueError: a k beyond the number of samples.
    """

    accuracy: Reward | None = None
    num_samples: int = 0
    pass_at: tuple[int, ...] | None = None
    before_training: bool = True

    def __post_init__(self) -> None:
        if self.num_samples < 0 or any(not 1 <= k <= self.num_samples for k in self.pass_at or ()):
            raise UserError(
                f"pass_at must lie in [1, num_samples], got {self.pass_at} with num_samples "
                f"{self.num_samples} (pass@k is estimated from at least k samples). "
                "Set model.evaluation.num_samples."
            )
        self.suite = RewardSuite([self.accuracy or MathReward()])

    @property
    def metric_names(self) -> list[str]:
        """What an evaluation of judged completions measures."""
        n = self.num_samples
        samples = [f"val/avg@{n}", *(f"val/pass@{k}" for k in self.pass_at or (n,))] if n else []
        return ["val/accuracy", *samples]

    def add_metrics(
        self,
        metrics: Metrics,
        engine: RolloutEngine,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        *,
        seed: int,
    ) -> None:
        """Judge completions of these prompts and let them vote in ``val/…``."""
        greedy = self._judged(engine, prompts, 1, replace(sampling, temperature=0.0), seed)
        values = self._values(greedy)
        metrics.add_all("val/accuracy", values[~values.isnan()])
        metrics.add_all("val/unscored_fraction", values.isnan().double())
        metrics.add_all("val/mean_length", [float(len(c.token_ids)) for c in greedy.sampled])
        if self.num_samples:
            sampled = self._judged(engine, prompts, self.num_samples, sampling, seed)
            values = self._values(sampled)
            metrics.add_all(f"val/avg@{self.num_samples}", values[~values.isnan()])
            for k in self.pass_at or (self.num_samples,):
                metrics.add_all(f"val/pass@{k}", _pass_at(k, values))
        for observed in self.suite.observe():
            add_measurements(metrics, observed, prefix="val/")

    def _values(self, judged: RolloutBatch) -> Tensor:
        """[B, G] what the judge said, whatever its weight; NaN where it said nothing."""
        (values,) = judged.parts.values()
        return values

    def _judged(
        self,
        engine: RolloutEngine,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        seed: int,
    ) -> RolloutBatch:
        scoring = self.suite.open(prompts, group_size)
        for row, completion in engine.generate(prompts, group_size, sampling, seed=seed):
            scoring.add(row, completion)
        return scoring.result()


def _pass_at(k: int, values: Tensor) -> list[float]:
    """pass@k of every group of [B, G] with at least k judged samples."""
    estimates = []
    for group in values:
        right, judged = int((group == 1).sum()), int((~group.isnan()).sum())
        if judged >= k:
            estimates.append(pass_at_k(judged, right, k))
    return estimates


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Chance that k samples drawn without replacement hold a right one, without bias.

    Source: Chen et al. 2021, arXiv 2107.03374 equation 1.
    """
    return 1 - comb(num_samples - num_right, k) / comb(num_samples, k)
