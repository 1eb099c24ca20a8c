"""Attention within a pack in padded blocks of rows of similar length, for any device and model.

Every row of a block has a copy of the keys and values that it sees, which the backward pass needs,
too. The masks are made once for all layers, except under ``torch.compile``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lit_grpo.policy.packed.packing import Block, Layout

ALIGNMENT = 16
"""Alignment of a mask's rows, in elements; a GPU's fused attention copies others in every layer."""


def block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    *,
    window: int | None,
    scaling: float | None,
    softcap: float | None,
) -> Tensor:
    """Return [1, T, heads, D] for queries, keys and values [1, heads, T, D]."""
    groups = query.shape[1] // key.shape[1]
    attended = [
        _attend(
            _gather(query, block.queries),
            _gather(key, block.keys),
            _gather(value, block.keys),
            _mask(layout, number, window, groups, query.dtype, is_capped=softcap is not None),
            scaling,
            softcap,
        )
        for number, block in enumerate(layout.blocks)
    ]
    flat = torch.cat([block.transpose(1, 2).flatten(0, 1) for block in attended])
    return flat.index_select(0, layout.restore)[None]


def _gather(states: Tensor, indices: Tensor) -> Tensor:
    """Return [R, heads, L, D], the tokens of [1, heads, T, D] at indices [R, L]."""
    tokens = states[0].transpose(0, 1).index_select(0, indices.flatten())
    return torch.unflatten(tokens, 0, indices.shape).transpose(1, 2)


def _mask(
    layout: Layout,
    number: int,
    window: int | None,
    groups: int,
    dtype: torch.dtype,
    *,
    is_capped: bool,
) -> Tensor | None:
    """Return the mask of a block, or None if plain causal attention does without.

    A program of ``torch.compile`` makes it in every layer: under gradient checkpointing it must not
    store what it has made.
    """
    block = layout.blocks[number]
    if window is not None and window >= block.keys.shape[1]:
        window = None
    if not block.shares and window is None and not is_capped:
        return None
    if torch.compiler.is_compiling():
        return _make_mask(block, window, groups, dtype)
    which: Any = (number, window, groups, dtype)
    if which not in layout.derived:
        layout.derived[which] = _make_mask(block, window, groups, dtype)
    mask: Tensor = layout.derived[which]
    return mask


def _make_mask(block: Block, window: int | None, groups: int, dtype: torch.dtype) -> Tensor:
    """Return [R, 1, groups * Q, K], 0 where a query sees a key and minus infinity elsewhere.

    Fused attention would convert a boolean mask to floats in every layer, and keep every copy.
    """
    num_keys = block.keys.shape[1]
    key_positions = torch.arange(-(-num_keys // ALIGNMENT) * ALIGNMENT, device=block.keys.device)
    positions = block.positions[:, None, :, None]
    hidden = key_positions > positions
    if window is not None:
        hidden |= key_positions <= positions - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    mask = mask.masked_fill(hidden, -torch.inf)
    # Query heads that share a key head become further queries of one head, see `_attend`.
    return mask[:, :, None].expand(-1, -1, groups, -1, -1).flatten(2, 3)[..., :num_keys]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
) -> Tensor:
    """Return [R, heads, Q, D]; without a mask query q sees the first q + 1 keys."""
    groups = query.shape[1] // key.shape[1]
    if mask is None:
        # Only when true: with dynamic shapes `groups > 1` is symbolic, and torch wants a bool.
        grouped: dict[str, Any] = {"enable_gqa": True} if groups > 1 else {}
        return scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, **grouped
        )
    # Query heads that share a key head become further queries of one head, so that keys need not
    # be repeated.
    query = torch.unflatten(query, 1, (-1, groups)).flatten(2, 3)
    if softcap is None:
        attended = scaled_dot_product_attention(query, key, value, mask, scale=scaling)
    else:
        attended = _capped_attention(query, key, value, mask, scaling, softcap)
    return torch.unflatten(attended, 2, (groups, -1)).flatten(1, 2)


def _capped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None,
    softcap: float,
) -> Tensor:
    """Compute attention step by step, because no kernel of torch soft-caps the scores."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.tanh(query @ key.transpose(2, 3) * scale / softcap) * softcap + mask
    return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value
