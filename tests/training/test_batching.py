import pytest
import torch
from tiny import completion, rollouts, train_batch

from lit_grpo.policy.padding import pad
from lit_grpo.training.batching import micro_batches, minibatches


def example():
    completions = [
        [completion([1]), completion([1, 2, 3])],
        [completion([4, 5], finish_reason="length"), completion([6])],
    ]
    return rollouts([[0, 1], [1, 0]], completions)


def test_pad_puts_prompts_to_the_right_and_completions_to_the_left():
    ids, mask = pad([[1], [2, 3]], 0, torch.long, left=True)
    assert ids.tolist() == [[0, 1], [2, 3]]
    assert mask.tolist() == [[False, True], [True, True]]
    ids, mask = pad([[1], [2, 3]], 9, torch.long)
    assert ids.tolist() == [[1, 9], [2, 3]]
    assert mask.tolist() == [[True, False], [True, True]]


def test_the_prompt_stands_once_a_group():
    batch = train_batch(example())
    assert batch.prompt_ids.shape == (2, 4)
    assert batch.prompt_index.tolist() == [0, 0, 1, 1]
    assert batch.completion_ids.tolist() == [[1, 0, 0], [1, 2, 3], [4, 5, 0], [6, 0, 0]]


def test_rows_that_may_not_be_trained_on_have_no_token_in_the_loss():
    batch = rollouts([[0, 1, None], [1, None, None]])
    assert train_batch(batch).loss_mask.any(1).tolist() == [True, True, False, False, False, False]


def test_overlong_filtering_leaves_truncated_completions_out():
    kept = train_batch(example(), overlong_filtering=True).loss_mask.any(1)
    assert kept.tolist() == [True, True, False, True]


def test_select_keeps_only_the_prompts_and_columns_that_it_needs():
    part = train_batch(example()).select(torch.tensor([3, 2]))
    assert part.prompt_ids.shape == (1, 4)
    assert part.prompt_index.tolist() == [0, 0]
    assert part.completion_ids.tolist() == [[6, 0], [4, 5]]


@pytest.mark.parametrize("packed", [True, False])
def test_micro_batches_hold_every_row_once_within_the_budget(packed):
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
        if packed:  # every prompt once, nothing padded
            tokens = int(selected.prompt_mask.sum() + selected.completion_mask.sum())
        else:
            width = selected.prompt_ids.shape[1] + selected.completion_ids.shape[1]
            tokens = len(part) * width
        assert tokens <= 80 or len(part) == 1


def test_the_rows_of_a_group_stay_together_where_the_prompt_is_run_once():
    completions = [[completion([1] * length) for length in row] for row in ((9, 1), (8, 2), (7, 3))]
    batch = train_batch(rollouts([[0, 1]] * 3, completions))
    parts = micro_batches(batch, torch.arange(6), max_tokens=30, packed=True)
    assert [sorted(batch.prompt_index[part].tolist()) for part in parts] == [[1, 1, 2, 2], [0, 0]]


def test_a_row_beyond_the_budget_stands_alone():
    batch = train_batch(rollouts([[0, 1]], [[completion([1] * 50), completion([1])]]))
    for packed in (True, False):
        parts = micro_batches(batch, torch.arange(2), max_tokens=10, packed=packed)
        assert [part.tolist() for part in parts] == [[0], [1]]


def test_minibatches_are_whole_groups_and_at_most_as_many_as_there_are():
    batch = train_batch(rollouts([[0, 1]] * 5))
    assert [part.num_rows for part in minibatches(batch, 2)] == [6, 4]
    assert [part.num_rows for part in minibatches(batch, 9)] == [2] * 5
