"""The parts of a pack give every token all that it sees, once, and repeat no shared key."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from prefix_trees import GROUPS, pack_of, visible

from lit_grpo.policy.packed.pack_parts import Part, full_parts, window_parts


def seen(parts: list[Part], num_tokens: int, window: int | None = None) -> torch.Tensor:
    """Return [T, T] how often each token sees each other one, by plain loops."""
    times = torch.zeros(num_tokens, num_tokens, dtype=torch.long)
    everything = torch.arange(num_tokens)
    for part in parts:
        queries, keys = everything[part.queries], everything[part.keys]
        starts = (part.query_offsets.tolist(), part.key_offsets.tolist())
        for number in range(len(starts[0]) - 1):
            own = queries[starts[0][number] : starts[0][number + 1]].tolist()
            others = keys[starts[1][number] : starts[1][number + 1]].tolist()
            assert len(own) <= part.max_queries
            assert len(others) <= part.max_keys
            for i, query in enumerate(own):
                last = len(others) - len(own) + i if part.is_causal else len(others) - 1
                first = 0 if window is None else max(0, last + 1 - window)
                for key in others[first : last + 1]:
                    times[query, key] += 1
    return times


@given(GROUPS)
def test_every_token_sees_its_prefix_once(groups):
    packed = pack_of(groups)
    times = seen(full_parts(packed.layout.rows), packed.ids.shape[1])
    assert times.equal(visible(packed).long())


@given(GROUPS, st.integers(1, 9))
def test_within_a_window_every_token_sees_the_end_of_its_prefix_once(groups, window):
    packed = pack_of(groups)
    times = seen(window_parts(packed.layout.rows, window), packed.ids.shape[1], window)
    assert times.equal(visible(packed, window).long())


@given(GROUPS)
def test_a_part_asks_for_no_token_twice(groups):
    packed = pack_of(groups)
    everything = torch.arange(packed.ids.shape[1])
    first, *others = full_parts(packed.layout.rows)
    assert everything[first.queries].equal(everything)
    for part in others:
        assert len(everything[part.queries].unique()) == part.query_offsets[-1]


def test_the_prompt_of_a_group_is_read_once_and_not_copied():
    packed = pack_of([([5, 6, 7], [[1, 1, 1], [2, 2, 2], [3, 3]])])
    own, prompt = full_parts(packed.layout.rows)
    assert own.query_offsets.tolist() == own.key_offsets.tolist() == [0, 5, 7, 8]
    assert (prompt.queries, prompt.keys) == (slice(5, 8), slice(0, 3))
    assert (prompt.query_offsets.tolist(), prompt.key_offsets.tolist()) == ([0, 3], [0, 3])
    assert (prompt.max_queries, prompt.max_keys, prompt.is_causal) == (3, 3, False)


def test_what_some_completions_share_beyond_the_prompt_is_a_part_of_its_own():
    packed = pack_of([([5, 6], [[1, 4, 1], [1, 5, 1], [2, 2]]), ([7, 8], [[1, 1], [2, 1]])])
    assert packed.ids.tolist() == [[5, 6, 1, 4, 5, 2, 7, 8, 1, 2]]
    own, prompts, words = full_parts(packed.layout.rows)
    assert own.query_offsets.tolist() == [0, 4, 5, 6, 9, 10]
    assert prompts.queries.tolist() == [4, 5, 9]
    assert prompts.keys.tolist() == [0, 1, 6, 7]
    assert prompts.query_offsets.tolist() == [0, 2, 3]
    assert prompts.key_offsets.tolist() == [0, 2, 4]
    assert (words.queries, words.keys) == (slice(4, 5), slice(2, 3))


def test_rows_that_share_nothing_have_one_part():
    packed = pack_of([([5], [[1] * 20]), ([6], [[2] * 9])])
    assert len(full_parts(packed.layout.rows)) == 1
