"""Scored groups to padded tensors, and those to micro-batches within a token budget.

Nothing here changes what a token weighs in the loss: that is settled before the split.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_grpo.policy.padding import pad
from lit_grpo.types import RolloutBatch, TrainBatch, UserError


@dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """How one rollout step's groups become optimizer steps.

    Args:
        epochs: Passes over the rollouts; their optimizer steps are ``epochs * minibatches``.
        minibatches: Optimizer steps an epoch, each on its share of the groups.
        max_tokens_per_micro_batch: Tokens that go through the model at once: those of a prompt
            once a group, those of every completion, none of padding. (Where the log says that the
            model runs padded: every row's, padded, with its prompt.) Memory follows it; the
            gradient does not depend on it.
        max_grad_norm: The gradient is scaled down to this norm.

    Raises:
        ValueError: a value below its least.
    """

    epochs: int = 1
    minibatches: int = 1
    max_tokens_per_micro_batch: int = 16384
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        for name in ("epochs", "minibatches", "max_tokens_per_micro_batch"):
            if getattr(self, name) < 1:
                raise UserError(
                    f"{name} must be >= 1, got {getattr(self, name)} (every rollout step updates "
                    f"the policy at least once). Set model.update.{name}."
                )

    @property
    def optimizer_steps(self) -> int:
        return self.epochs * self.minibatches


def collate_rollouts(
    rollouts: RolloutBatch, *, pad_id: int, overlong_filtering: bool
) -> TrainBatch:
    """The rollouts as tensors; what must not be trained on has a False ``loss_mask``.

    That is: rows that are not valid, groups with fewer than two valid rows and, with overlong
    filtering (DAPO, arXiv 2503.14476 section 3.4), completions that hit the token limit.
    Advantages are 0 until they are known.
    """
    completions = rollouts.completions
    prompt_ids, prompt_mask = pad(
        [group.prompt.token_ids for group in rollouts.groups], pad_id, torch.long, left=True
    )
    completion_ids, completion_mask = pad([c.token_ids for c in completions], pad_id, torch.long)
    sampler_logprobs, _ = pad([c.sampler_logprobs for c in completions], 0.0, torch.float32)
    trained = (rollouts.valid & (rollouts.valid.sum(1, keepdim=True) >= 2)).flatten()
    if overlong_filtering:
        trained &= ~torch.tensor([c.is_truncated for c in completions])
    return TrainBatch(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        prompt_index=torch.arange(len(completions)) // rollouts.group_size,
        completion_ids=completion_ids,
        completion_mask=completion_mask,
        loss_mask=completion_mask & trained[:, None],
        advantages=torch.zeros(len(completions)),
        sampler_logprobs=sampler_logprobs,
    )


def minibatches(batch: TrainBatch, num_minibatches: int) -> Iterator[TrainBatch]:
    """The batch in ``num_minibatches`` parts of whole groups, one optimizer step each.

    Fewer when there are fewer groups.
    """
    groups = torch.arange(batch.prompt_ids.shape[0])
    for part in groups.tensor_split(min(num_minibatches, len(groups))):
        yield batch.select(torch.isin(batch.prompt_index.cpu(), part).nonzero()[:, 0])


def micro_batches(
    batch: TrainBatch, rows: Tensor, max_tokens: int, *, packed: bool
) -> list[Tensor]:
    """These rows in micro-batches, each within a budget of tokens.

    Longest first, so that memory peaks at the start. A row beyond the budget stands alone.

    Args:
        rows: Indices of the rows that go through the model.
        packed: It runs packs (`packing`), so that the rows of a group belong together.

    Returns:
        Row indices, one tensor a micro-batch; an empty list for no rows.
    """
    prompts = batch.prompt_mask.sum(1)[batch.prompt_index].tolist()
    lengths = batch.completion_mask.sum(1).tolist()
    longest_first = sorted(rows.tolist(), key=lambda row: -(prompts[row] + lengths[row]))
    if packed:
        groups: dict[int, list[int]] = {}
        index = batch.prompt_index.tolist()
        for row in longest_first:
            groups.setdefault(index[row], []).append(row)
        parts = _whole_groups(list(groups.values()), prompts, lengths, max_tokens)
    else:
        parts = _similar_rows(longest_first, prompts, lengths, max_tokens)
    return [torch.tensor(part) for part in parts]


def _whole_groups(
    groups: list[list[int]], prompts: list[int], lengths: list[int], max_tokens: int
) -> list[list[int]]:
    """Largest group first; a group is parted only where it is beyond the budget."""
    tokens = [prompts[group[0]] + sum(lengths[row] for row in group) for group in groups]
    parts: list[list[int]] = []
    used = max_tokens
    for total, group in sorted(zip(tokens, groups, strict=True), reverse=True):
        if used + total > max_tokens:
            parts.append([])
            used = 0
        used += prompts[group[0]]
        for row in group:
            if parts[-1] and used + lengths[row] > max_tokens:
                parts.append([])
                used = prompts[row]
            parts[-1].append(row)
            used += lengths[row]
    return parts


def _similar_rows(
    rows: list[int], prompts: list[int], lengths: list[int], max_tokens: int
) -> list[list[int]]:
    """Rows as they come, as many as fit with all padded to the longest prompt and completion."""
    parts: list[list[int]] = []
    widest_prompt = widest = 0
    for row in rows:
        widest_prompt = max(widest_prompt, prompts[row])
        widest = max(widest, lengths[row])
        if parts and (len(parts[-1]) + 1) * (widest_prompt + widest) <= max_tokens:
            parts[-1].append(row)
        else:
            parts.append([row])
            widest_prompt, widest = prompts[row], lengths[row]
    return parts
