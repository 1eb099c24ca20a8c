"""The arithmetic of a step against hand-computed micro-batches."""

from __future__ import annotations

import pytest

from lit_grpo.cli.doctor.batch import Plan, count_tokens, several, split

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
    plan = Plan(
        num_ranks=3,
        prompt_lengths=(6, 4),
        completion_tokens=10,
        group_size=2,
        optimizer_steps=1,
        micro_batches=1,
        micro_batch_tokens=50,
        micro_batch_rows=4,
    )
    assert (plan.num_rows, plan.row_tokens, plan.num_tokens) == (4, 16, 3 * 50)


def test_counts_have_their_plural():
    assert several(1, "step") == "1 step"
    assert several(1200, "micro-batch", "micro-batches") == "1,200 micro-batches"
