import pytest
import torch
from tiny import completion, rollouts, train_batch

from lit_grpo.policy.packed.packing import pack
from lit_grpo.training.batching import (
    UpdateConfig,
    collate_rollouts,
    micro_batches,
    minibatches,
    to_train_batch,
)


def example():
    completions = [
        [completion([1]), completion([1, 2, 3])],
        [completion([4, 5], finish_reason="length"), completion([6])],
    ]
    return rollouts([[0, 1], [1, 0]], completions)


def test_the_prompt_is_in_the_batch_once_per_group():
    batch = train_batch(example())
    assert batch.prompt_ids.shape == (2, 4)
    assert batch.prompt_index.tolist() == [0, 0, 1, 1]
    assert batch.completion_ids.tolist() == [[1, 0, 0], [1, 2, 3], [4, 5, 0], [6, 0, 0]]


def test_invalid_rows_rows_without_siblings_and_empty_rows_have_no_token_in_the_loss():
    two = [completion([1, 2]), completion([]), completion([3])]
    batch = rollouts([[0, 1, None], [1, None, None]], [two, two])
    assert train_batch(batch).loss_mask.any(1).tolist() == [True, *[False] * 5]


def test_old_and_sampler_logprobs_are_in_the_batch_at_their_tokens():
    batch = rollouts([[0, 1]], [[completion([7], logprobs=[-2.0]), completion([8, 9])]])
    tokens = collate_rollouts(batch, pad_id=0)
    old = torch.full((2, 2), -3.0)
    made = to_train_batch(
        tokens,
        batch,
        trained=torch.tensor([True, False]),
        advantages=torch.tensor([0.5, 0.0], dtype=torch.float64),
        old_logprobs=old,
    )
    assert made.sampler_logprobs.tolist() == [[-2.0, 0.0], [-1.0, -1.0]]
    assert made.loss_mask.tolist() == [[True, False], [False, False]]
    assert made.advantages.tolist() == [0.5, 0.0]
    assert made.advantages.dtype == torch.float32
    assert made.old_logprobs is old


def test_overlong_filtering_excludes_truncated_completions():
    kept = train_batch(example(), overlong_filtering=True).loss_mask.any(1)
    assert kept.tolist() == [True, True, False, True]


@pytest.mark.parametrize("packed", [True, False])
def test_micro_batches_contain_every_row_once_within_the_budget(packed):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 30, (6, 4), generator=generator).tolist()
    batch = train_batch(
        rollouts(
            [[0, 1, None, 2]] * 6,
            [[completion([1] * length) for length in row] for row in lengths],
        )
    )
    rows = batch.loss_mask.any(1).nonzero()[:, 0]
    parts = micro_batches(batch, rows, max_tokens=80, packed=packed)
    assert sorted(torch.cat(parts).tolist()) == rows.tolist()
    for part in parts:
        selected = batch.select(part)
        if packed:  # every prompt once, no padding
            tokens = int(selected.prompt_mask.sum() + selected.completion_mask.sum())
        else:
            width = selected.prompt_ids.shape[1] + selected.completion_ids.shape[1]
            tokens = len(part) * width
        assert tokens <= 80 or len(part) == 1


@pytest.mark.parametrize("seed", range(5))
def test_the_packs_of_micro_batches_hold_no_more_tokens_than_the_budget(seed):
    """Prompts of four tokens are shared by completions of up to 29 tokens, not by longer ones."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 60, (5, 4), generator=generator).tolist()
    batch = train_batch(
        rollouts(
            [[0, 1, 2, 3]] * 5,
            [[completion([1 + i] * length) for i, length in enumerate(row)] for row in lengths],
        )
    )
    for part in micro_batches(batch, torch.arange(20), max_tokens=150, packed=True):
        assert pack(batch.select(part)).ids.shape[1] <= 150


def test_a_short_prompt_counts_once_per_completion_and_a_longer_one_once():
    # A row of 4 + 29 tokens shares the prompt: 4 is an eighth of the 32 that the model reads.
    completions = [[completion([1 + i] * length) for i in range(3)] for length in (29, 30)]
    batch = train_batch(rollouts([[0, 1, 2]] * 2, completions))
    rows = torch.arange(6)
    for group, tokens in enumerate((4 + 3 * 29, 3 * (4 + 30))):
        own = rows[batch.prompt_index == group]
        assert len(micro_batches(batch, own, max_tokens=tokens, packed=True)) == 1
        assert len(micro_batches(batch, own, max_tokens=tokens - 1, packed=True)) == 2


def test_the_rows_of_a_group_stay_together_when_packs_contain_the_prompt_once():
    completions = [[completion([1] * length) for length in row] for row in ((9, 1), (8, 2), (7, 3))]
    batch = train_batch(rollouts([[0, 1]] * 3, completions))
    parts = micro_batches(batch, torch.arange(6), max_tokens=30, packed=True)
    assert [sorted(batch.prompt_index[part].tolist()) for part in parts] == [[1, 1, 2, 2], [0, 0]]


def test_a_row_beyond_the_budget_gets_a_micro_batch_of_its_own():
    batch = train_batch(rollouts([[0, 1]], [[completion([1] * 50), completion([1])]]))
    for packed in (True, False):
        parts = micro_batches(batch, torch.arange(2), max_tokens=10, packed=packed)
        assert [part.tolist() for part in parts] == [[0], [1]]


def test_minibatches_are_whole_groups_and_at_most_as_many_as_there_are():
    batch = train_batch(rollouts([[0, 1]] * 5))
    assert [part.num_rows for part in minibatches(batch, 2)] == [6, 4]
    assert [part.num_rows for part in minibatches(batch, 9)] == [2] * 5


@pytest.mark.parametrize(
    ("setting", "value", "rule"),
    [
        ("epochs", 0, ">= 1"),
        ("minibatches", 0, ">= 1"),
        ("max_tokens_per_micro_batch", 0, ">= 1"),
        ("max_grad_norm", 0, "positive"),
        ("max_grad_norm", float("nan"), "positive"),
    ],
)
def test_a_setting_that_is_out_of_range_is_refused(setting, value, rule):
    message = rf"update.{setting} must be {rule}, got {value}.* Set model.update.{setting}\."
    with pytest.raises(ValueError, match=message):
        UpdateConfig(**{setting: value})
