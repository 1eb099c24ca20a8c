"""Groups with nested prefixes, who sees whom in their pack, and attention written plainly."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from packed_batches import batch_of
from torch import Tensor

from lit_grpo.policy.packed.packing import Pack, pack

TOKENS = st.integers(1, 2)
ROWS = st.lists(TOKENS, min_size=1, max_size=9)
GROUPS = st.lists(st.tuples(ROWS, st.lists(ROWS, min_size=1, max_size=4)), min_size=1, max_size=3)
"""Prompts and completions of so few different tokens that many share a prefix."""


def pack_of(groups: list) -> Pack:
    return pack(batch_of(*[part for group in groups for part in group]))


def visible(packed: Pack, window: int | None = None) -> Tensor:
    """Return [T, T] True where the first token sees the second, from the rows of the pack."""
    rows = packed.layout.rows
    assert rows is not None
    num_tokens = packed.ids.shape[1]
    sees = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    for places, length in zip(rows.indices.tolist(), rows.num_tokens.tolist(), strict=True):
        for end in range(length):
            start = 0 if window is None else max(0, end + 1 - window)
            sees[places[end], places[start : end + 1]] = True
    return sees


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, sees: Tensor, scaling: float | None = None
) -> Tensor:
    """Return [1, T, heads, D] by a softmax over all tokens, in double precision."""
    times = query.shape[1] // key.shape[1]
    keys, values = (one.double().repeat_interleave(times, 1) for one in (key, value))
    scores = query.double() @ keys.mT * (scaling or query.shape[-1] ** -0.5)
    weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
    return (weights @ values).transpose(1, 2)


def random_states(
    packed: Pack, heads: int = 4, kv_heads: int = 2, *, size: int = 8, dtype=torch.float32
) -> list[Tensor]:
    """Return queries, keys and values [1, heads, T, D] in the memory order of a model's layers."""
    torch.manual_seed(0)
    shapes = [(1, packed.ids.shape[1], count, size) for count in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, dtype=dtype).transpose(1, 2).requires_grad_() for shape in shapes]


def kept_bytes(run) -> int:
    """Return the bytes of the storages that autograd keeps of a calculation, each once."""
    storages = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return sum(one.nbytes() for one in storages.values())


def assert_same(ours: Tensor, theirs: Tensor, states: list[Tensor], tolerance: float) -> None:
    """Compare two results of the same states, and their gradients."""
    grad = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
    first = [ours, *torch.autograd.grad(ours, states, grad.to(ours.dtype))]
    second = [theirs, *torch.autograd.grad(theirs, states, grad.to(theirs.dtype))]
    for one, other in zip(first, second, strict=True):
        assert (one.double() - other.double()).abs().max() <= tolerance
