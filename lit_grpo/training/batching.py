"""Turn scored groups into padded tensors, and split these into minibatches and micro-batches.

A token has the same weight in the loss for any split into micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import lightning as L
import torch
from torch import Tensor

from lit_grpo.distributed.ranks import sum_over_ranks
from lit_grpo.objective import Objective
from lit_grpo.objective.inputs import TokenCounts
from lit_grpo.objective.token_advantages import TokenRewards
from lit_grpo.policy.packed.packing import is_worth_sharing
from lit_grpo.policy.padding import pad
from lit_grpo.types import RolloutBatch, TokenBatch, TrainBatch, check_range
from lit_grpo.types.field_types import check_fields
from lit_grpo.types.keywords import checks_keywords


@checks_keywords
@dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """How the groups of one rollout step are split into optimizer steps.

    Args:
        epochs: Passes over the rollouts of a step, which takes ``epochs * minibatches`` optimizer
            steps.
        minibatches: Optimizer steps per pass, each on an equal share of the groups.
        max_tokens_per_micro_batch: Token budget of one forward and backward pass (verl:
            ``ppo_max_token_len_per_gpu``). It bounds memory and does not change the gradient.
            Completions count without padding, and each prompt once per group; a prompt shorter
            than an eighth of its row is not shared and counts once per completion. If the log says
            that the model runs padded, each row counts with its prompt and padding. Two things come
            on top, and ``lit-grpo plan`` includes both: without variable-length FlashAttention each
            completion copies the keys and values of its prompt in every layer; and there are
            attention masks, which ``policy.compile`` keeps for every layer.
        max_grad_norm: The gradient is scaled down to at most this norm.
        max_skipped_steps: Stop the run when so many optimizer steps in a row were skipped because
            their gradients were not finite.

    Raises:
        UserError: a setting is out of range.
    """

    epochs: int = 1
    minibatches: int = 1
    max_tokens_per_micro_batch: int = 16384
    max_grad_norm: float = 1.0
    max_skipped_steps: int = 5

    def __post_init__(self) -> None:
        check_fields("model.update", self)
        key = "model.update."
        why = "every rollout step updates the policy at least once"
        check_range(f"{key}epochs", self.epochs, at_least=1, why=why)
        check_range(f"{key}minibatches", self.minibatches, at_least=1, why=why)
        check_range(
            f"{key}max_tokens_per_micro_batch",
            self.max_tokens_per_micro_batch,
            at_least=1,
            why="a row that exceeds the budget gets its own micro-batch",
        )
        check_range(f"{key}max_grad_norm", self.max_grad_norm, above=0)
        check_range(f"{key}max_skipped_steps", self.max_skipped_steps, at_least=1)

    @property
    def optimizer_steps(self) -> int:
        return self.epochs * self.minibatches


def collate_tokens(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], *, pad_id: int
) -> TokenBatch:
    """Return B prompts and their B * G completions, in row order, as padded tensors."""
    prompt_ids, prompt_mask = pad(prompts, pad_id, torch.long, left=True)
    completion_ids, completion_mask = pad(completions, pad_id, torch.long)
    return TokenBatch(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        prompt_index=torch.arange(len(completions)) // (len(completions) // len(prompts)),
        completion_ids=completion_ids,
        completion_mask=completion_mask,
    )


def trained_rows(rollouts: RolloutBatch, *, overlong_filtering: bool) -> Tensor:
    """Return [N] True on the rows with a token in the loss.

    Such a row is counted (see `counted_rows`) and not empty. Overlong filtering (DAPO, arXiv
    2503.14476 section 3.4) excludes the rows that hit the token limit.
    """
    trained = rollouts.counted.flatten()
    trained &= torch.tensor([bool(one.token_ids) for one in rollouts.completions])
    if overlong_filtering:
        trained &= ~torch.tensor([one.is_truncated for one in rollouts.completions])
    return trained


def collate_token_rewards(
    rollouts: RolloutBatch, weights: Mapping[str, float], tokens: TokenBatch
) -> TokenRewards:
    """Return the rewards at the tokens that they come at: the last one, or their steps' tokens."""
    values = torch.zeros(tokens.completion_mask.shape, dtype=torch.float64)
    has_reward = torch.zeros_like(tokens.completion_mask)
    for row, completion in enumerate(rollouts.completions):
        last = len(completion.token_ids) - 1
        group, index = divmod(row, rollouts.group_size)
        for name, scores in rollouts.groups[group].scores.items():
            score = scores[index]
            if score.value is None or not weights[name] or last < 0:
                continue
            rest = score.value - sum(value for _, value in score.steps)
            at_end = [] if score.steps and abs(rest) <= 1e-9 * abs(score.value) else [(last, rest)]
            for position, value in [*score.steps, *at_end]:
                values[row, position] += weights[name] * value
                has_reward[row, position] = True
    return TokenRewards(
        values=values,
        has_reward=has_reward,
        mask=tokens.completion_mask & rollouts.counted.flatten()[:, None],
        group_size=rollouts.group_size,
    )


def collate_rollouts(rollouts: RolloutBatch, *, pad_id: int) -> TokenBatch:
    """Return the token ids of the rollouts as padded tensors."""
    return collate_tokens(
        [group.prompt.token_ids for group in rollouts.groups],
        [completion.token_ids for completion in rollouts.completions],
        pad_id=pad_id,
    )


def to_train_batch(
    tokens: TokenBatch,
    rollouts: RolloutBatch,
    *,
    trained: Tensor,
    advantages: Tensor,
    old_logprobs: Tensor | None = None,
    is_good: Tensor | None = None,
) -> TrainBatch:
    """Add what the loss needs to the tokens.

    Args:
        trained: [N] True on the rows with a token in the loss.
        advantages: [N], or [N, C] by token.
        old_logprobs: [N, C] if they have been computed already.
        is_good: [N] True on the completions whose likelihood is raised.
    """
    reported = [completion.sampler_logprobs for completion in rollouts.completions]
    sampler_logprobs, _ = pad(reported, 0.0, torch.float32)
    return TrainBatch(
        **{field.name: getattr(tokens, field.name) for field in fields(tokens)},
        loss_mask=tokens.completion_mask & trained[:, None],
        advantages=advantages.float(),
        sampler_logprobs=sampler_logprobs,
        old_logprobs=old_logprobs,
        is_good=is_good,
    )


def count_tokens(module: L.LightningModule, batch: TrainBatch, max_tokens: int) -> TokenCounts:
    """Count the tokens of the batch over all ranks; every rank must call this.

    Args:
        max_tokens: Longest completion that sampling allows.
    """
    mask = batch.loss_mask
    is_good = torch.tensor(False) if batch.is_good is None else batch.is_good[:, None]
    local = [mask.sum(), mask.any(1).sum(), batch.surrogate_mask.sum(), (mask & is_good).sum()]
    tokens, sequences, entropy_tokens, good_tokens = map(int, sum_over_ranks(module, local))
    return TokenCounts(
        tokens=tokens,
        sequences=sequences,
        max_tokens=max_tokens,
        local_tokens=int(local[0]),
        num_ranks=module.trainer.world_size,
        entropy_tokens=entropy_tokens,
        good_tokens=good_tokens,
    )


def rows_with_gradient(batch: TrainBatch, objective: Objective) -> Tensor:
    """Return the rows that can have a gradient.

    Without a KL or entropy term, a row with advantage 0 has no gradient, so it is skipped.
    """
    trained = batch.loss_mask.any(1)
    if not objective.has_gradient_at_zero_advantage:
        has_gradient = batch.advantages_by_token.any(1)
        trained &= has_gradient if batch.is_good is None else has_gradient | batch.is_good
    return trained.nonzero()[:, 0]


def first_row(batch: TokenBatch) -> TokenBatch:
    """Return the first row alone: for a pass that a rank makes only because the others make it."""
    return batch.select(torch.zeros(1, dtype=torch.long))


def minibatches(batch: TrainBatch, num_minibatches: int) -> Iterator[TrainBatch]:
    """Split a batch into ``num_minibatches`` parts of whole groups, for one optimizer step each.

    There are fewer parts if there are fewer groups.
    """
    groups = torch.arange(batch.prompt_ids.shape[0])
    for part in groups.tensor_split(min(num_minibatches, len(groups))):
        yield batch.select(torch.isin(batch.prompt_index, part).nonzero()[:, 0])


def micro_batches(
    batch: TokenBatch, rows: Tensor, max_tokens: int, *, packed: bool
) -> list[Tensor]:
    """Split rows into micro-batches within a token budget.

    The longest rows come first, so memory peaks at the start. A row that exceeds the budget
    gets its own micro-batch.

    Args:
        rows: Indices of the rows that go through the model.
        packed: The model runs packed sequences (see `packing`), which contain the prompt once per
            group, so the rows of a group stay together. What a micro-batch counts is what its pack
            holds at most: completions that begin alike also share their beginning.

    Returns:
        Row indices, one tensor per micro-batch; an empty list for no rows.
    """
    prompt_tokens = batch.prompt_mask.sum(1)[batch.prompt_index]
    completion_tokens = batch.completion_mask.sum(1)
    prompts, lengths = prompt_tokens.tolist(), completion_tokens.tolist()
    longest_first = sorted(rows.tolist(), key=lambda row: -(prompts[row] + lengths[row]))
    if packed:
        groups: dict[int, list[int]] = {}
        index = batch.prompt_index.tolist()
        for row in longest_first:
            groups.setdefault(index[row], []).append(row)
        added = added_tokens(prompt_tokens, completion_tokens).tolist()
        parts = _whole_groups(list(groups.values()), prompts, lengths, added, max_tokens)
    else:
        parts = _similar_rows(longest_first, prompts, lengths, max_tokens)
    return [torch.tensor(part) for part in parts]


def added_tokens(prompt_tokens: Tensor, completion_tokens: Tensor) -> Tensor:
    """Return how many tokens each row adds to a pack that has another row of the same prompt."""
    num_tokens = prompt_tokens + completion_tokens
    shares = is_worth_sharing(prompt_tokens, num_tokens - 1)
    return completion_tokens.where(shares, num_tokens)


def _whole_groups(
    groups: list[list[int]],
    prompts: list[int],
    lengths: list[int],
    added: list[int],
    max_tokens: int,
) -> list[list[int]]:
    """Fill micro-batches, the largest group first; split a group only if it exceeds the budget."""

    def num_tokens(group: list[int]) -> int:
        first, *others = group
        return prompts[first] + lengths[first] + sum(added[row] for row in others)

    parts: list[list[int]] = []
    used = max_tokens
    for group in sorted(groups, key=lambda group: (num_tokens(group), group), reverse=True):
        for rows, tokens in _pieces(group, prompts, lengths, added, max_tokens):
            if used + tokens > max_tokens:
                parts.append([])
                used = 0
            parts[-1] += rows
            used += tokens
    return parts


def _pieces(
    group: list[int], prompts: list[int], lengths: list[int], added: list[int], max_tokens: int
) -> Iterator[tuple[list[int], int]]:
    """Yield a group's rows and tokens: as one piece, or as several if it exceeds the budget."""
    piece, used = [group[0]], prompts[group[0]] + lengths[group[0]]
    for row in group[1:]:
        if used + added[row] > max_tokens:
            yield piece, used
            piece, used = [row], prompts[row] + lengths[row]
        else:
            piece.append(row)
            used += added[row]
    yield piece, used


def _similar_rows(
    rows: list[int], prompts: list[int], lengths: list[int], max_tokens: int
) -> list[list[int]]:
    """Fill micro-batches in row order; each is padded to its longest row."""
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
