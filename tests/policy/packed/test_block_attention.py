"""Attention in padded blocks: values and gradients, and masks that are made once."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prefix_trees import (
    GROUPS,
    assert_same,
    kept_bytes,
    pack_of,
    plain_attention,
    random_states,
    visible,
)

from lit_grpo.policy.packed.block_attention import block_attention


@given(
    GROUPS,
    st.one_of(st.none(), st.integers(1, 9)),
    st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    st.sampled_from([None, 0.2]),
)
def test_values_and_gradients_are_those_of_plain_attention(groups, window, heads, scaling):
    packed = pack_of(groups)
    states = random_states(packed, *heads)
    ours = block_attention(*states, packed.layout, window=window, scaling=scaling, softcap=None)
    assert_same(ours, plain_attention(*states, visible(packed, window), scaling), states, 1e-5)


def test_a_mask_is_made_and_kept_once_for_all_layers():
    packed = pack_of([(list(range(1, 30)), [[1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]])])
    states = random_states(packed)

    def bytes_of(num_layers: int) -> int:
        return kept_bytes(
            lambda: [
                block_attention(*states, packed.layout, window=None, scaling=None, softcap=None)
                for _ in range(num_layers)
            ]
        )

    one, two, three = map(bytes_of, (1, 2, 3))
    (mask,) = packed.layout.derived.values()
    # Two rows share the prompt; three queries of two heads each; 32 keys.
    assert mask.shape == (2, 1, 2 * 3, 32)
    per_layer = three - two
    assert two - one == per_layer
    assert one - per_layer >= mask.untyped_storage().nbytes()


@pytest.mark.parametrize("window", [None, 3])
def test_the_rows_of_a_mask_start_where_a_gpu_need_not_copy_them(window):
    packed = pack_of([([1, 2, 3, 4, 5], [[1, 2], [2, 1]])])
    states = random_states(packed)
    block_attention(*states, packed.layout, window=window, scaling=None, softcap=None)
    for mask in packed.layout.derived.values():
        assert {stride % 16 for stride in mask.stride()[:-1]} == {0}
        assert mask.stride(-1) == 1


def test_masks_of_different_kinds_of_layers_are_not_confused():
    packed = pack_of([([1, 2, 3, 4, 5], [[1, 2], [2, 1]])])
    states = random_states(packed)
    for window in (None, 3, None, 2):
        ours = block_attention(*states, packed.layout, window=window, scaling=None, softcap=None)
        plain = plain_attention(*states, visible(packed, window))
        torch.testing.assert_close(ours.double(), plain, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_program_for_any_number_of_heads_is_one_graph():
    packed = pack_of([([1, 2, 3, 4, 5], [[1, 2], [2, 1]])])
    states = random_states(packed, 4, 2)
    program = torch.compile(block_attention, backend="eager", fullgraph=True, dynamic=True)
    ours = program(*states, packed.layout, window=None, scaling=None, softcap=None)
    plain = plain_attention(*states, visible(packed, None))
    torch.testing.assert_close(ours.double(), plain, rtol=0, atol=1e-5)
