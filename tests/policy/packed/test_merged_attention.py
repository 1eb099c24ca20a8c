"""Attention merged from parts: values, gradients and what is kept, against plain attention.

The CPU runs the operators of `flash_on_cpu`; on a machine with a GPU its own are compared as well.
"""

import math

import flash_on_cpu
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
from lit_grpo.policy.packed.merged_attention import merge, merged_attention
from lit_grpo.policy.packed.pack_parts import full_parts, window_parts

NESTED = [([5, 6, 7], [[1, 4, 1, 2], [1, 4, 2], [1, 5, 1], [2, 2]]), ([6, 8], [[1, 1], [2, 1]])]

flash_on_cpu.install()


def parts_of(packed, window=None):
    rows = packed.layout.rows
    return full_parts(rows) if window is None else window_parts(rows, window)


@given(
    GROUPS,
    st.one_of(st.none(), st.integers(1, 9)),
    st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    st.sampled_from([None, 0.2]),
)
def test_values_and_gradients_are_those_of_plain_and_of_padded_attention(
    groups, window, heads, scaling
):
    packed = pack_of(groups)
    states = random_states(packed, *heads)
    parts = parts_of(packed, window)
    ours = merged_attention(*states, parts, window=window, scaling=scaling)
    plain = plain_attention(*states, visible(packed, window), scaling)
    assert_same(ours, plain, states, 1e-5)
    ours = merged_attention(*states, parts, window=window, scaling=scaling)
    padded = block_attention(*states, packed.layout, window=window, scaling=scaling, softcap=None)
    assert_same(ours, padded, states, 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 2])
def test_in_16_bits_it_is_as_close_as_they_allow(dtype, window):
    packed = pack_of(NESTED)
    states = random_states(packed, dtype=dtype)
    ours = merged_attention(*states, parts_of(packed, window), window=window, scaling=None)
    assert ours.dtype == dtype
    assert_same(ours, plain_attention(*states, visible(packed, window)), states, 0.05)


def test_two_halves_of_the_keys_weigh_as_much_as_their_scores():
    # One query; scores log 1 and log 3 of the first keys, log 4 of the other one.
    out, lse = torch.tensor([[[2.0]]]), torch.tensor([[math.log(1 + 3)]])
    merge(out, lse, slice(0, 1), torch.tensor([[[10.0]]]), torch.tensor([[math.log(4)]]))
    assert out.item() == pytest.approx(6)
    assert lse.item() == pytest.approx(math.log(8))


def test_only_queries_keys_values_result_and_log_sum_exp_are_kept_each_once():
    packed = pack_of(NESTED)
    heads, kv_heads, size, tokens = 4, 2, 8, packed.ids.shape[1]
    states = random_states(packed, heads, kv_heads, size=size, dtype=torch.bfloat16)
    kept = kept_bytes(
        lambda: merged_attention(*states, parts_of(packed), window=None, scaling=None)
    )
    assert kept == tokens * (2 * (2 * heads + 2 * kv_heads) * size + 4 * heads)


def test_torch_accepts_these_arguments_of_its_operators_and_gives_results_of_these_shapes():
    packed, device = pack_of(NESTED), torch.device("meta")
    states = [
        one.detach().to(device).requires_grad_()
        for one in random_states(packed, dtype=torch.bfloat16)
    ]
    parts = [part.to(device) for part in parts_of(packed)]
    out = merged_attention(*states, parts, window=None, scaling=0.3)
    assert out.shape == states[0].transpose(1, 2).shape
    for one, gradient in zip(states, torch.autograd.grad(out.sum(), states), strict=True):
        assert gradient.shape == one.shape


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("window", [None, 2, 100])
@pytest.mark.parametrize("length", [1, 40])
def test_the_operators_of_a_gpu_give_plain_attention(size, heads, window, length):
    groups = [(prompt * length, [row * length for row in rows]) for prompt, rows in NESTED]
    packed, device = pack_of(groups), torch.device("cuda", 0)
    on_cpu = random_states(packed, *heads, size=size, dtype=torch.bfloat16)
    states = [one.detach().to(device).requires_grad_() for one in on_cpu]
    parts = [part.to(device) for part in parts_of(packed, window)]
    ours = merged_attention(*states, parts, window=window, scaling=None)
    plain = plain_attention(*states, visible(packed, window).to(device))
    grad = torch.randn(plain.shape, generator=torch.Generator().manual_seed(1)).to(device)
    first = [ours, *torch.autograd.grad(ours, states, grad.to(ours.dtype))]
    second = [plain, *torch.autograd.grad(plain, states, grad.double())]
    for one, other in zip(first, second, strict=True):
        assert (one.double() - other.double()).norm() < 0.02 * other.double().norm()
