import random

import pytest
import torch
from packs import batch_of, prefixes, random_rows

from lit_grpo.policy.packing import pack


def test_every_distinct_prefix_stands_once_and_the_last_tokens_not_at_all():
    packed = pack(batch_of([5, 6], [[7, 8, 9], [7, 4]]))
    assert packed.ids.tolist() == [[5, 6, 7, 8]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3]]
    assert packed.predictors.tolist() == [1, 2, 3, 1, 2]


def test_prompts_that_begin_alike_share_their_beginning():
    packed = pack(batch_of([5, 6, 1], [[7, 8]], [5, 6, 2], [[7, 8]]))
    assert packed.ids.tolist() == [[5, 6, 1, 7, 2, 7]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 2, 3]]


def test_equal_completions_are_run_once():
    packed = pack(batch_of([5, 6], [[7, 8, 9], [7, 8, 9]]))
    assert packed.ids.tolist() == [[5, 6, 7, 8]]
    assert packed.predictors.tolist() == [1, 2, 3, 1, 2, 3]


def test_what_is_less_than_an_eighth_of_a_row_is_run_again():
    long = list(range(2, 30))
    for completions, times in (([[2, 3], [4, 5]], 1), ([long, long[::-1]], 2)):
        assert pack(batch_of([1], completions)).ids[0].tolist().count(1) == times


def seen(packed) -> list[list[int]]:
    """By token of the pack, the tokens that it sees; read off the blocks as attention does it."""
    rows = []
    for block in packed.layout.blocks:
        num_queries, num_keys = block.queries.shape[1], block.keys.shape[1]
        causal = torch.ones(1, 1, num_queries, num_keys, dtype=torch.bool).tril()
        mask = causal.expand(len(block.keys), -1, -1, -1) if block.mask is None else block.mask
        for keys, sees in zip(block.keys, mask[:, 0], strict=True):
            rows += [keys[query].tolist() for query in sees]
    return [rows[place] for place in packed.layout.restore.tolist()]


@pytest.mark.parametrize("for_compile", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_every_token_sees_its_own_prefix_and_every_completion_token_is_predicted_by_its(
    seed, for_compile
):
    groups = random_rows(random.Random(seed))
    batch = batch_of(*groups)
    packed = pack(batch, for_compile=for_compile)
    ids = packed.ids[0].tolist()
    spelled = [tuple(ids[place] for place in places) for places in seen(packed)]
    assert [len(prefix) - 1 for prefix in spelled] == packed.position_ids[0].tolist()
    assert [prefix[-1] for prefix in spelled] == ids
    expected = prefixes(groups)
    assert [spelled[place] for place in packed.predictors.tolist()] == expected
    assert set(spelled) == {prefix[:n] for prefix in expected for n in range(1, len(prefix) + 1)}


def test_short_rows_have_no_prefix_twice():
    groups = random_rows(random.Random(3), longest=6)
    packed = pack(batch_of(*groups))
    spelled = {prefix[:n] for prefix in prefixes(groups) for n in range(1, len(prefix) + 1)}
    assert packed.ids.shape[1] == len(spelled)


def test_a_compiled_model_gets_two_blocks_without_a_side_of_length_one():
    for groups in (
        [[5, 6], [[7, 8, 9], [7, 4]]],
        [[5, 6], [[7]]],
        [[5, 6, 7], [[7, 8, 9]], [8, 6, 7], [[1, 8, 9], [2, 2]]],
    ):
        blocks = pack(batch_of(*groups), for_compile=True).layout.blocks
        assert [block.mask is None for block in blocks] == [True, False]
        for block in blocks:
            assert min(*block.queries.shape, *block.keys.shape) >= 2
