"""Metrics of a rollout step: sums and counts that merge over micro-batches and ranks.

Ranks may hold different names (a rank without a valid row has no reward): merging never waits
for a name. Nothing here logs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_grpo.distributed import gather_objects
from lit_grpo.objective.loss import TokenLosses
from lit_grpo.types import Measurements, Outcome, RolloutBatch, TrainBatch


class Metrics:
    """Named means, extremes, totals and percentiles. A name without a value is absent, never 0."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, float | Tensor] = defaultdict(float)
        self._counts: defaultdict[str, float | Tensor] = defaultdict(float)
        self._maxima: dict[str, list[float | Tensor]] = defaultdict(list)
        self._minima: dict[str, list[float | Tensor]] = defaultdict(list)
        self._totals: defaultdict[str, float] = defaultdict(float)
        self._samples: defaultdict[tuple[str, float], list[float]] = defaultdict(list)

    def add(self, name: str, total: float | Tensor, count: float | Tensor = 1.0) -> None:
        """Let ``count`` values with this total vote in the mean."""
        self._sums[name] = self._sums[name] + total
        self._counts[name] = self._counts[name] + count

    def add_all(self, name: str, values: Iterable[float] | Tensor) -> None:
        """Let each value vote in the mean."""
        tensor = torch.as_tensor(values if isinstance(values, Tensor) else list(values))
        self.add(name, tensor.double().sum(), tensor.numel())

    def maximum(self, name: str, value: float | Tensor) -> None:
        self._maxima[name].append(value)

    def minimum(self, name: str, value: float | Tensor) -> None:
        self._minima[name].append(value)

    def total(self, name: str, value: float) -> None:
        """Let a value be added up over the step and the ranks."""
        self._totals[name] += value

    def percentile(self, name: str, values: Sequence[float], percent: float) -> None:
        """Let values be among those whose percentile is taken, linear between neighbours."""
        self._samples[name, percent].extend(values)

    def merged(self) -> dict[str, float]:
        """The values over all ranks; every rank must call this."""
        merged = Metrics()
        for sums, counts, maxima, minima, totals, samples in gather_objects(self._as_floats()):
            for name, total in sums.items():
                merged.add(name, total, counts[name])
            for name, value in maxima.items():
                merged.maximum(name, value)
            for name, value in minima.items():
                merged.minimum(name, value)
            for name, value in totals.items():
                merged.total(name, value)
            for (name, percent), values in samples.items():
                merged.percentile(name, values, percent)
        sums, counts, maxima, minima, totals, samples = merged._as_floats()
        means = {name: sums[name] / counts[name] for name in sums if counts[name]}
        percentiles = {
            name: float(np.percentile(values, percent))
            for (name, percent), values in samples.items()
            if values
        }
        return means | maxima | minima | totals | percentiles

    def _as_floats(self) -> tuple[dict[Any, Any], ...]:
        return (
            {name: float(value) for name, value in self._sums.items()},
            {name: float(value) for name, value in self._counts.items()},
            {name: max(map(float, values)) for name, values in self._maxima.items()},
            {name: min(map(float, values)) for name, values in self._minima.items()},
            dict(self._totals),
            dict(self._samples),
        )


def add_rollout_metrics(metrics: Metrics, rollouts: RolloutBatch) -> None:
    """``reward/…`` and ``completions/…`` of one rollout step; the glossary is docs/metrics.md."""
    valid, rewards = rollouts.valid, rollouts.rewards
    metrics.add_all("reward/mean", rewards[valid])
    metrics.add_all("reward/valid_fraction", valid.double())
    deviations = _deviations(rewards, valid)
    metrics.add_all("reward/std", deviations)
    metrics.add_all("reward/frac_zero_std", (deviations < 1e-9).double())
    for name, part in rollouts.parts.items():
        metrics.add_all(f"reward/{name}/mean", part[~part.isnan()])
        outcomes = [score.outcome for group in rollouts.groups for score in group.scores[name]]
        for outcome in Outcome:
            metrics.add(f"reward/{name}/{outcome}_fraction", outcomes.count(outcome), len(outcomes))
    _add_completion_metrics(metrics, rollouts)


def _add_completion_metrics(metrics: Metrics, rollouts: RolloutBatch) -> None:
    failed = [float(completion.is_failed) for completion in rollouts.completions]
    metrics.add_all("rollout/failed_fraction", failed)
    if not (sampled := rollouts.sampled):
        return
    lengths = [len(completion.token_ids) for completion in sampled]
    metrics.add_all("completions/mean_length", lengths)
    metrics.maximum("completions/max_length", max(lengths))
    metrics.minimum("completions/min_length", min(lengths))
    logprobs = [value for completion in sampled for value in completion.sampler_logprobs]
    metrics.add("sampler/entropy", -sum(logprobs), len(logprobs))
    truncated = [float(completion.is_truncated) for completion in sampled]
    metrics.add_all("completions/truncated_fraction", truncated)


def _deviations(rewards: Tensor, valid: Tensor) -> Tensor:
    """Sample deviation of each group of [B, G] with two valid rows or more."""
    groups = valid.sum(1) >= 2
    rewards, valid = rewards[groups], valid[groups]
    num_valid = valid.sum(1, keepdim=True)
    means = torch.where(valid, rewards, 0.0).sum(1, keepdim=True) / num_valid
    squares = torch.where(valid, rewards - means, 0.0).square().sum(1, keepdim=True)
    return (squares / (num_valid - 1)).sqrt()[:, 0]


def add_measurements(metrics: Metrics, observed: Measurements, prefix: str = "") -> None:
    """What a reward measured while it scored, under the names that it gives."""
    for name, value in observed.totals.items():
        metrics.total(prefix + name, value)
    for name, values in observed.means.items():
        metrics.add_all(prefix + name, values)
    for name, values in observed.samples.items():
        metrics.add_all(prefix + name, values)
        metrics.percentile(f"{prefix}{name}_p95", values, 95)


def add_advantage_metrics(metrics: Metrics, advantages: Tensor, trained: Tensor) -> None:
    """``advantage/…`` over the rows that are trained on.

    Args:
        advantages: [N].
        trained: [N] True on rows with a token in the loss.
    """
    values = advantages[trained].double()
    metrics.add_all("advantage/abs_mean", values.abs())
    metrics.add_all("advantage/zero_fraction", (values == 0).double())
    if len(values):
        metrics.maximum("advantage/max", values.max())
        metrics.minimum("advantage/min", values.min())


def add_refill_metrics(metrics: Metrics, num_groups: int, num_sampled: int, num_left: int) -> None:
    """``dynamic_sampling/…``: what filling up a rollout step's groups took.

    Args:
        num_groups: Groups that are trained on.
        num_sampled: Groups that were sampled for them.
        num_left: Groups among them without an advantage after the last round.
    """
    metrics.add("dynamic_sampling/sampled_per_group", num_sampled, num_groups)
    metrics.add("dynamic_sampling/unfilled_fraction", num_left, num_groups)


@torch.no_grad()
def add_update_metrics(
    metrics: Metrics, batch: TrainBatch, losses: TokenLosses, entropy: Tensor
) -> None:
    """``policy/…`` and ``sampler/logprob_difference_…`` over the tokens that have a gradient."""
    mask = batch.loss_mask
    num_tokens = mask.sum()
    difference = losses.sampler_log_ratio.abs()
    means = {
        "policy/entropy": entropy,
        "policy/ratio_mean": losses.ratio,
        "policy/clip_low_fraction": losses.beyond_low,
        "policy/clip_high_fraction": losses.beyond_high,
        "policy/masked_fraction": ~losses.kept,
        "sampler/logprob_difference_mean": difference,
    }
    if losses.kl is not None:
        means["policy/kl"] = losses.kl
    for name, values in means.items():
        metrics.add(name, (values * mask).sum(), num_tokens)
    metrics.maximum("sampler/logprob_difference_max", (difference * mask).max())
