"""Metrics of a rollout step, merged over micro-batches and ranks.

Ranks may have different names: a rank without a valid row has no reward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from lit_grpo.distributed.ranks import gather_objects
from lit_grpo.objective.advantages import group_deviation, has_signal
from lit_grpo.objective.loss import TokenLosses
from lit_grpo.types import Measurements, Outcome, RolloutBatch, TrainBatch


class Metrics:
    """Collect means, extremes, totals and percentiles by name.

    A name without a value is left out of the result; it is never 0.
    """

    def __init__(self) -> None:
        self._sums: defaultdict[str, float | Tensor] = defaultdict(float)
        self._counts: defaultdict[str, float | Tensor] = defaultdict(float)
        self._maxima: dict[str, list[float | Tensor]] = defaultdict(list)
        self._minima: dict[str, list[float | Tensor]] = defaultdict(list)
        self._totals: defaultdict[str, float] = defaultdict(float)
        self._samples: defaultdict[tuple[str, float], list[float]] = defaultdict(list)

    def add(self, name: str, total: float | Tensor, count: float | Tensor = 1.0) -> None:
        """Add ``count`` values with this total to a mean."""
        self._sums[name] = self._sums[name] + total
        self._counts[name] = self._counts[name] + count

    def add_all(self, name: str, values: Iterable[float] | Tensor) -> None:
        """Add each value to a mean."""
        tensor = torch.as_tensor(values if isinstance(values, Tensor) else list(values))
        self.add(name, tensor.double().sum(), tensor.numel())

    def maximum(self, name: str, value: float | Tensor) -> None:
        self._maxima[name].append(value)

    def minimum(self, name: str, value: float | Tensor) -> None:
        self._minima[name].append(value)

    def total(self, name: str, value: float) -> None:
        """Add a value to a sum over the step and all ranks."""
        self._totals[name] += value

    def percentile(self, name: str, values: Sequence[float], percent: float) -> None:
        """Add values to a percentile, which is interpolated linearly."""
        self._samples[name, percent].extend(values)

    def merged(self) -> dict[str, float]:
        """Return the values over all ranks; every rank must call this."""
        own, merged = Metrics(), Metrics()
        own._include(self)  # turns tensors into floats, which are cheap to send
        for metrics in gather_objects(own):
            merged._include(metrics)
        return merged._values()

    def _include(self, other: Metrics) -> None:
        """Add everything that was added to other metrics, as floats."""
        extremes = [*other._maxima.values(), *other._minima.values()]
        numbers = iter(_floats([*other._sums.values(), *other._counts.values(), *chain(*extremes)]))
        sums = [next(numbers) for _ in other._sums]
        for name, total in zip(other._sums, sums, strict=True):
            self.add(name, total, next(numbers))
        for name, values in other._maxima.items():
            self.maximum(name, max(next(numbers) for _ in values))
        for name, values in other._minima.items():
            self.minimum(name, min(next(numbers) for _ in values))
        for name, value in other._totals.items():
            self.total(name, value)
        for (name, percent), samples in other._samples.items():
            self.percentile(name, samples, percent)

    def _values(self) -> dict[str, float]:
        counts = {name: float(count) for name, count in self._counts.items()}
        return (
            {name: float(self._sums[name]) / count for name, count in counts.items() if count}
            | {name: max(map(float, values)) for name, values in self._maxima.items()}
            | {name: min(map(float, values)) for name, values in self._minima.items()}
            | dict(self._totals)
            | {
                name: float(np.percentile(values, percent))
                for (name, percent), values in self._samples.items()
                if values
            }
        )


def _floats(values: Sequence[float | Tensor]) -> list[float]:
    """Return numbers and scalar tensors as floats; tensors on a GPU are copied from it at once."""
    floats = [0.0 if isinstance(value, Tensor) else float(value) for value in values]
    tensors: dict[torch.device, dict[int, Tensor]] = defaultdict(dict)
    for place, value in enumerate(values):
        if isinstance(value, Tensor):
            tensors[value.device][place] = value
    for found in tensors.values():
        copied = torch.stack([value.detach().double() for value in found.values()]).tolist()
        for place, number in zip(found, copied, strict=True):
            floats[place] = number
    return floats


def in_group_deviations(rollouts: RolloutBatch) -> Tensor:
    """Return the standard deviation of the rewards of each group with rows to compare."""
    deviations = group_deviation(rollouts.rewards, rollouts.valid)
    return deviations[rollouts.counted.any(1), 0]


def add_rollout_metrics(metrics: Metrics, rollouts: RolloutBatch) -> None:
    """Add the metrics of a step's rewards and completions, described in docs/metrics.md."""
    valid, rewards = rollouts.valid, rollouts.rewards
    metrics.add_all("reward/mean", rewards[valid])
    metrics.add_all("reward/valid_fraction", valid.double())
    is_compared = rollouts.counted.any(1)
    metrics.add_all("reward/std", in_group_deviations(rollouts))
    metrics.add_all("reward/frac_zero_std", (~has_signal(rewards, valid))[is_compared].double())
    for name, part in rollouts.parts.items():
        metrics.add_all(f"reward/{name}/mean", part[~part.isnan()])
        scores = [score for group in rollouts.groups for score in group.scores[name]]
        outcomes = [score.outcome for score in scores if score.is_for_source]
        for outcome in (one for one in Outcome if one is not Outcome.OTHER_SOURCE):
            metrics.add(f"reward/{name}/{outcome}_fraction", outcomes.count(outcome), len(outcomes))
    _add_completion_metrics(metrics, rollouts)
    _add_source_metrics(metrics, rollouts)


def _add_source_metrics(metrics: Metrics, rollouts: RolloutBatch) -> None:
    """Add the rewards and lengths of each source of a mixture."""
    has_signals = has_signal(rollouts.rewards, rollouts.valid)
    is_compared = rollouts.counted.any(1)
    for index, group in enumerate(rollouts.groups):
        if not (source := group.prompt.source):
            continue
        metrics.add_all(f"reward/{source}/mean", rollouts.rewards[index][rollouts.valid[index]])
        lengths = [len(one.token_ids) for one in group.completions if not one.is_failed]
        metrics.add_all(f"completions/{source}/mean_length", lengths)
        if is_compared[index]:
            metrics.add(f"reward/{source}/frac_zero_std", float(not has_signals[index]))


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


def add_measurements(metrics: Metrics, measured: Measurements, prefix: str = "") -> None:
    """Add what a reward or an engine has measured, under its own names."""
    for name, value in measured.totals.items():
        metrics.total(prefix + name, value)
    for name, values in measured.means.items():
        metrics.add_all(prefix + name, values)
    for name, values in measured.samples.items():
        metrics.add_all(prefix + name, values)
        metrics.percentile(f"{prefix}{name}_p95", values, 95)


def add_advantage_metrics(metrics: Metrics, advantages: Tensor, trained: Tensor) -> None:
    """Add ``advantage/…`` of the rows that are trained on.

    Args:
        advantages: [N], or [N, C] by token.
        trained: [N] True on rows with a token in the loss, or [N, C] on those tokens.
    """
    values = advantages[trained].double()
    metrics.add_all("advantage/abs_mean", values.abs())
    metrics.add_all("advantage/zero_fraction", (values == 0).double())
    if len(values):
        metrics.maximum("advantage/max", values.max())
        metrics.minimum("advantage/min", values.min())


def add_refill_metrics(metrics: Metrics, num_groups: int, num_sampled: int, num_left: int) -> None:
    """Add ``dynamic_sampling/…``: how many groups were sampled, and how many are left unfilled.

    Args:
        num_groups: Groups of the step.
        num_sampled: Groups that were sampled to get them.
        num_left: Groups of the step that still have no advantage after the last round.
    """
    metrics.add("dynamic_sampling/sampled_per_group", num_sampled, num_groups)
    metrics.add("dynamic_sampling/unfilled_fraction", num_left, num_groups)


@torch.no_grad()
def add_update_metrics(
    metrics: Metrics, batch: TrainBatch, losses: TokenLosses, entropy: Tensor
) -> None:
    """Add ``policy/…`` and ``sampler/logprob_difference_…`` of a micro-batch's trained tokens."""
    mask = batch.loss_mask
    num_tokens = mask.sum()
    difference = losses.sampler_log_ratio.abs()
    means = {
        "policy/entropy": entropy,
        "policy/ratio_mean": losses.ratio,
        "policy/clip_low_fraction": losses.clipped_low,
        "policy/clip_high_fraction": losses.clipped_high,
        "policy/masked_fraction": ~losses.has_surrogate,
        "sampler/logprob_difference_mean": difference,
    }
    if losses.kl is not None:
        means["policy/kl"] = losses.kl
    if losses.distillation_kl is not None:
        means["policy/distillation_kl"] = losses.distillation_kl
    means |= {f"own/{name}": value for name, value in losses.own_metrics.items()}
    for name, values in means.items():
        metrics.add(name, (values * mask).sum(), num_tokens)
    metrics.maximum("sampler/logprob_difference_max", (difference * mask).max())
