"""The arithmetic of a step against hand-computed micro-batches."""

from __future__ import annotations

import pytest

from lit_grpo.cli.estimate.step import count_tokens, split, step_sizes
from lit_grpo.training import UpdateConfig

PROMPTS = [6, 4]


@pytest.mark.parametrize(
    ("budget", "packed", "rows", "tokens"),
    [
        (None, True, [[0, 1, 2, 3]], [6 + 4 + 4 * 10]),
        (100, True, [[0, 1, 2, 3]], [50]),
        (30, True, [[0, 1], [2, 3]], [6 + 20, 4 + 20]),
        (16, True, [[0], [1], [2], [3]], [16, 16, 14, 14]),
        (5, True, [[0], [1], [2], [3]], [16, 16, 14, 14]),  # each row has its own micro-batch
        (32, False, [[0, 1], [2, 3]], [32, 28]),
    ],
)
def test_rows_are_split_as_in_training(budget, packed, rows, tokens):
    parts = split(PROMPTS, 2, 10, budget, packed=packed)
    assert [part.tolist() for part in parts] == rows
    assert [count_tokens(part, PROMPTS, 2, 10, packed=packed) for part in parts] == tokens


def test_many_long_completions_take_no_memory():
    (part,) = split([10] * 512, 64, 2**20, None, packed=True)
    parts = split([10] * 8, 4, 2**20, 2**30, packed=True)
    assert len(part) == 512 * 64
    assert [len(one) for one in parts] == [32]


def test_a_step_has_the_prompts_once_and_the_rows_of_all_processes():
    step = step_sizes([6, 4], 10, num_ranks=3, group_size=2, update=UpdateConfig())
    assert (step.num_rows, step.row_tokens, step.num_tokens) == (4, 16, 3 * 50)
    assert (step.micro_batches, step.micro_batch_rows, step.micro_batch_tokens) == (1, 4, 50)
    assert (step.mean_prompt_tokens, step.mean_completion_tokens) == (5, 10)


def test_optimizer_steps_are_those_of_all_epochs():
    update = UpdateConfig(epochs=3, minibatches=2, max_tokens_per_micro_batch=16)
    step = step_sizes([6, 4], 10, group_size=2, update=update)
    assert (step.optimizer_steps, step.micro_batches, step.micro_batch_tokens) == (6, 2, 16)


@pytest.mark.parametrize(
    ("prompt", "packed", "masked"),
    [
        (6, True, 2),  # of two groups of two, one row each
        (1, True, 0),  # 1 of 11 tokens is less than an eighth: it is not shared
        (6, False, 0),
    ],
)
def test_rows_that_share_a_prompt_have_masks_but_for_the_first_of_a_group(prompt, packed, masked):
    step = step_sizes([prompt] * 2, 10, group_size=2, update=UpdateConfig(), packed=packed)
    assert step.masked_rows == masked


def test_a_warm_up_has_one_micro_batch():
    step = step_sizes([6] * 50, 1000, group_size=1, update=None)
    assert (step.micro_batches, step.micro_batch_rows, step.optimizer_steps) == (1, 50, 1)
