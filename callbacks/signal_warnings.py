"""Warn when a rollout step teaches the policy nothing, with the cause."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback

from lit_grpo.diagnostics import (
    LIKELY_FRACTION,
    equal_rewards,
    identical_fraction,
    nothing_to_compare,
    truncated_fraction,
)
from lit_grpo.objective.advantages import has_signal
from lit_grpo.types import RolloutBatch, TrainBatch

log = logging.getLogger(__name__)

CERTAIN = 0.01
"""A sequence with a log-probability this close to 0 would be sampled 99 times out of 100."""

Check = Callable[[RolloutBatch, TrainBatch | None], str | None]


class SignalWarnings(Callback):
    """Warn about steps that teach the policy nothing, with the cause and what to change.

    Args:
        repeat_every: Each warning is logged at the first step that it applies to, and then once in
            this many such steps.
    """

    def __init__(self, repeat_every: int = 50) -> None:
        self.repeat_every = repeat_every
        self._seen: Counter[str] = Counter()

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if not isinstance(outputs, Mapping) or "rollouts" not in outputs:
            return
        if not trainer.is_global_zero:
            return
        for name, check in CHECKS.items():
            if message := check(outputs["rollouts"], outputs.get("batch")):
                self._warn(name, message, trainer.fit_loop.total_batch_idx)

    def _warn(self, name: str, message: str, step: int) -> None:
        self._seen[name] += 1
        seen = self._seen[name]
        if seen == 1 or seen % self.repeat_every == 0:
            often = "" if seen == 1 else f" ({seen} steps so far)"
            log.warning("rollout step %d%s: %s", step, often, message)


def nothing_trained(rollouts: RolloutBatch, batch: TrainBatch | None) -> str | None:
    if batch is not None and batch.loss_mask.any():
        return None
    why = nothing_to_compare(rollouts) or (
        "every valid row is filtered. See model.objective.overlong_filtering and "
        f"model.sampling.max_tokens: {truncated_fraction(rollouts):.0%} of the completions "
        "were cut off."
    )
    return f"No token contributes to the loss, so the policy did not change: {why}"


def no_advantage(rollouts: RolloutBatch, batch: TrainBatch | None) -> str | None:
    if batch is None or not (trained := batch.loss_mask.any(1)).any():
        return None
    if batch.advantages[trained].any():
        return None
    if not has_signal(rollouts.rewards, rollouts.valid).any():
        return equal_rewards(rollouts)
    num_filtered = int(rollouts.counted.sum()) - int(trained.sum())
    if not num_filtered:
        return (
            "All advantages are 0 although rewards differ inside groups. Check "
            "model.advantage.function."
        )
    return (
        f"All advantages are 0 on the {int(trained.sum())} rows that are left to train on; "
        f"{num_filtered} others are filtered, {truncated_fraction(rollouts):.0%} of the "
        "completions were cut off. Raise model.sampling.max_tokens, or set "
        "model.objective.overlong_filtering to false."
    )


def certain_policy(rollouts: RolloutBatch, batch: TrainBatch | None) -> str | None:
    sums = [sum(c.sampler_logprobs) for c in rollouts.completions if c.token_ids]
    if not sums or max(map(abs, sums)) >= CERTAIN:
        return None
    if not any(sums):
        return (
            "All sequence log-probabilities of the sampler are exactly 0: the rollout engine "
            "reports none, or it samples greedily. Set model.sampling.temperature above 0 and "
            "have the engine return the log-probabilities of the tokens that it samples."
        )
    return (
        f"All sequence log-probabilities are near 0 (the lowest is {min(sums):.2g}): the policy "
        "is certain of all its completions, so there is nothing to compare. Raise "
        "model.sampling.temperature or model.objective.entropy.coef, or use harder prompts."
    )


def identical_completions(rollouts: RolloutBatch, batch: TrainBatch | None) -> str | None:
    if (fraction := identical_fraction(rollouts)) < LIKELY_FRACTION:
        return None
    return (
        f"In {fraction:.0%} of the groups all {rollouts.group_size} completions are identical, so "
        "they cannot be compared. Raise model.sampling.temperature, check top_p and top_k, or use "
        "harder prompts."
    )


def truncated_completions(rollouts: RolloutBatch, batch: TrainBatch | None) -> str | None:
    if (fraction := truncated_fraction(rollouts)) <= LIKELY_FRACTION:
        return None
    return (
        f"{fraction:.0%} of the completions were cut off at the token limit before they ended. "
        "Raise model.sampling.max_tokens, reward shorter answers, or run lit-grpo sft first, so "
        "that the policy learns to end its answers."
    )


CHECKS: Mapping[str, Check] = {
    "nothing trained": nothing_trained,
    "no advantage": no_advantage,
    "certain policy": certain_policy,
    "identical completions": identical_completions,
    "truncated completions": truncated_completions,
}
