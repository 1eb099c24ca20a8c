"""Packs hold every distinct prefix once, and every token sees exactly its own prefix."""

import random

import pytest
import torch
from packed_batches import batch_of, prefixes, random_groups

from lit_grpo.policy.packed.packing import pack


def test_a_pack_holds_every_distinct_prefix_once_without_the_last_tokens():
    packed = pack(batch_of([5, 6], [[7, 8, 9], [7, 4]]))
    assert packed.ids.tolist() == [[5, 6, 7, 8]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3]]
    assert packed.predictors.tolist() == [1, 2, 3, 1, 2]


def test_a_pack_is_made_on_the_cpu_whatever_device_is_the_default():
    batch = batch_of([5, 6], [[7, 8, 9], [7, 4]])
    with torch.device("meta"):
        packed = pack(batch)
    assert packed.ids.tolist() == [[5, 6, 7, 8]]
    assert {tensor.device.type for block in packed.layout.blocks for tensor in block[:3]} == {"cpu"}


def test_prompts_with_a_common_prefix_share_it():
    packed = pack(batch_of([5, 6, 1], [[7, 8]], [5, 6, 2], [[7, 8]]))
    assert packed.ids.tolist() == [[5, 6, 1, 7, 2, 7]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 2, 3]]


def test_equal_completions_run_once():
    packed = pack(batch_of([5, 6], [[7, 8, 9], [7, 8, 9]]))
    assert packed.ids.tolist() == [[5, 6, 7, 8]]
    assert packed.predictors.tolist() == [1, 2, 3, 1, 2, 3]


def test_a_common_prefix_of_less_than_an_eighth_of_a_row_is_not_shared():
    long = list(range(2, 30))
    for completions, times in (([[2, 3], [4, 5]], 1), ([long, long[::-1]], 2)):
        assert pack(batch_of([1], completions)).ids[0].tolist().count(1) == times


def visible(packed) -> list[list[int]]:
    """Return the tokens that each token of the pack sees, read from the blocks as in attention."""
    rows = []
    for block in packed.layout.blocks:
        num_queries, num_keys = block.queries.shape[1], block.keys.shape[1]
        causal = torch.ones(1, 1, num_queries, num_keys, dtype=torch.bool).tril()
        shared = torch.arange(num_keys) <= block.positions[:, None, :, None]
        mask = shared if block.shares else causal.expand(len(block.keys), -1, -1, -1)
        for keys, sees in zip(block.keys, mask[:, 0], strict=True):
            rows += [keys[query].tolist() for query in sees]
    return [rows[place] for place in packed.layout.restore.tolist()]


@pytest.mark.parametrize("for_compile", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_every_token_sees_its_prefix_and_the_prefix_of_a_completion_token_predicts_it(
    seed, for_compile
):
    groups = random_groups(random.Random(seed))
    batch = batch_of(*groups)
    packed = pack(batch, for_compile=for_compile)
    ids = packed.ids[0].tolist()
    seen = [tuple(ids[place] for place in places) for places in visible(packed)]
    assert [len(prefix) - 1 for prefix in seen] == packed.position_ids[0].tolist()
    assert [prefix[-1] for prefix in seen] == ids
    expected = prefixes(groups)
    assert [seen[place] for place in packed.predictors.tolist()] == expected
    assert set(seen) == {prefix[:n] for prefix in expected for n in range(1, len(prefix) + 1)}


def test_a_pack_of_short_rows_holds_no_prefix_twice():
    groups = random_groups(random.Random(3), longest=6)
    packed = pack(batch_of(*groups))
    seen = {prefix[:n] for prefix in prefixes(groups) for n in range(1, len(prefix) + 1)}
    assert packed.ids.shape[1] == len(seen)


def test_a_pack_for_compile_has_two_blocks_without_a_dimension_of_size_one():
    for groups in (
        [[5, 6], [[7, 8, 9], [7, 4]]],
        [[5, 6], [[7]]],
        [[5, 6, 7], [[7, 8, 9]], [8, 6, 7], [[1, 8, 9], [2, 2]]],
    ):
        blocks = pack(batch_of(*groups), for_compile=True).layout.blocks
        assert [block.shares for block in blocks] == [False, True]
        for block in blocks:
            assert min(*block.queries.shape, *block.keys.shape) >= 2
