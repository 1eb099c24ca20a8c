"""Compute the sizes of a rollout step on one rank: prompts, completions, micro-batches."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_grpo.cli.built_run import BuiltRun
from lit_grpo.training.batching import UpdateConfig, added_tokens, micro_batches
from lit_grpo.types import TokenBatch

SHARED_FRACTION = 8
"""A pack shares a prompt that is at least this part of a row (`lit_grpo.policy.packed.packing`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """The sizes of a rollout step of one rank, if every completion is as long as allowed.

    In a warm-up a step is a batch, and each prompt has one completion. The means are for times,
    everything else is the most that a step can have.
    """

    num_ranks: int
    prompt_lengths: tuple[int, ...]
    """Tokens of the prompts of a rank, the longest first."""
    completion_tokens: int
    group_size: int
    optimizer_steps: int
    epochs: int = 1
    micro_batches: int
    """Number in an optimizer step."""
    micro_batch_tokens: int
    """Tokens that the model reads in the largest micro-batch, padding included."""
    micro_batch_rows: int
    """Completions in the largest micro-batch."""
    packed: bool = True
    budget: int | None = None
    """Tokens of a micro-batch; None for one micro-batch."""
    mean_prompt_tokens: float = 0.0
    mean_completion_tokens: float = 0.0

    @property
    def num_prompts(self) -> int:
        return len(self.prompt_lengths)

    @property
    def num_rows(self) -> int:
        return len(self.prompt_lengths) * self.group_size

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest prompt and completion together."""
        return self.prompt_lengths[0] + self.completion_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of a step over all processes, each prompt counted once."""
        own = sum(self.prompt_lengths) + self.num_rows * self.completion_tokens
        return self.num_ranks * own

    @property
    def masked_rows(self) -> int:
        """Rows of the largest micro-batch whose attention needs a mask.

        In a pack the first row of each group needs none. A prompt that is short against the
        completion is not shared.
        """
        if not self.packed:
            return 0
        is_shared = SHARED_FRACTION * self.prompt_lengths[0] >= self.row_tokens
        num_groups = math.ceil(self.micro_batch_rows / self.group_size)
        return self.micro_batch_rows - num_groups if is_shared else 0


def make_step(
    run: BuiltRun, num_ranks: int | None = None, mean_completion_tokens: float | None = None
) -> StepSizes:
    """Return the sizes of the largest step that the data and the settings allow.

    Args:
        num_ranks: None for the trainer's.
        mean_completion_tokens: None if completions are taken to be as long as allowed.
    """
    if num_ranks is None:
        num_ranks = int(run.trainer.world_size)
    num_prompts: int = max(1, run.cli.datamodule.prompts_per_step // num_ranks)
    all_lengths = run.prompt_lengths
    lengths = all_lengths[:num_prompts]
    lengths += [lengths[-1]] * (num_prompts - len(lengths))
    grpo = run.grpo
    return step_sizes(
        lengths,
        run.completion_tokens,
        num_ranks=num_ranks,
        group_size=grpo.group_size if grpo else 1,
        update=grpo.update if grpo else None,
        packed=run.module.policy.packing,
        mean_prompt_tokens=sum(all_lengths) / len(all_lengths),
        mean_completion_tokens=mean_completion_tokens,
    )


def step_sizes(
    prompt_lengths: list[int],
    completion_tokens: int,
    *,
    num_ranks: int = 1,
    group_size: int,
    update: UpdateConfig | None,
    packed: bool = True,
    mean_prompt_tokens: float | None = None,
    mean_completion_tokens: float | None = None,
) -> StepSizes:
    """Return the sizes of a step with these prompts of a rank, the longest first.

    Args:
        update: None for a warm-up, whose batch is one micro-batch.
    """
    budget = update.max_tokens_per_micro_batch if update else None
    num_parts = min(update.minibatches, len(prompt_lengths)) if update else 1
    largest = prompt_lengths[: math.ceil(len(prompt_lengths) / num_parts)]
    parts = split(largest, group_size, completion_tokens, budget, packed=packed)
    tokens = [
        count_tokens(part, largest, group_size, completion_tokens, packed=packed) for part in parts
    ]
    mean = sum(prompt_lengths) / len(prompt_lengths)
    epochs = update.epochs if update else 1
    return StepSizes(
        num_ranks=num_ranks,
        prompt_lengths=tuple(prompt_lengths),
        completion_tokens=completion_tokens,
        group_size=group_size,
        optimizer_steps=epochs * num_parts,
        epochs=epochs,
        micro_batches=len(parts),
        micro_batch_tokens=max(tokens),
        micro_batch_rows=max(map(len, parts)),
        packed=packed,
        budget=budget,
        mean_prompt_tokens=mean if mean_prompt_tokens is None else mean_prompt_tokens,
        mean_completion_tokens=float(completion_tokens)
        if mean_completion_tokens is None
        else mean_completion_tokens,
    )


def split(
    prompts: list[int], group_size: int, completion_tokens: int, budget: int | None, *, packed: bool
) -> list[Tensor]:
    """Return the rows of each micro-batch of an optimizer step, as training forms them.

    Args:
        prompts: Tokens of each prompt.
        budget: Tokens of a micro-batch; None for a single one.
    """
    num_rows = len(prompts) * group_size
    rows = torch.arange(num_rows)
    if budget is None:
        return [rows]
    lengths = torch.tensor(prompts)
    prompt_mask = torch.arange(max(prompts)) < lengths[:, None]
    # Of one element, however many completions there are.
    completions = torch.ones(1, 1, dtype=torch.bool).expand(num_rows, completion_tokens)
    batch = TokenBatch(
        prompt_ids=prompt_mask.long(),
        prompt_mask=prompt_mask,
        prompt_index=rows // group_size,
        completion_ids=completions,
        completion_mask=completions,
    )
    return micro_batches(batch, rows, budget, packed=packed)


def count_tokens(
    rows: Tensor, prompts: list[int], group_size: int, completion_tokens: int, *, packed: bool
) -> int:
    """Return how many tokens the model reads for these rows: a pack shares prompts."""
    indices: list[int] = (rows // group_size).tolist()
    if packed:
        completions = torch.tensor([completion_tokens])
        return sum(
            prompts[index]
            + completion_tokens
            + (count - 1) * int(added_tokens(torch.tensor([prompts[index]]), completions))
            for index, count in Counter(indices).items()
        )
    return len(rows) * (max(prompts[index] for index in indices) + completion_tokens)
