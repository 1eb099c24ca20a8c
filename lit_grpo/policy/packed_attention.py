"""Attention within a pack, registered with `transformers` under the name ``packed``.

Attention is the only part of a transformer that is not token-wise, so only here the tokens of a
pack are gathered into padded blocks of rows of similar length. A model runs it inside
`using_attention` and keeps its own attention everywhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig

from lit_grpo.policy.packing import Block, Layout

PACKED = "packed"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: int | None,
    *,
    layout: Layout | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return [1, T, heads, D] for queries, keys and values [1, heads, T, D] of a pack's tokens.

    Args:
        attention_mask: The value of `_window` in place of a mask: how many tokens a token sees.

    Raises:
        NotImplementedError: the model needs a feature that is missing here, or passes no blocks.
    """
    unknown = {name for name, given in others.items() if given is not None} - _NOT_ATTENTION
    if unknown or dropout:
        raise NotImplementedError(f"its attention uses {', '.join(sorted(unknown)) or 'dropout'}")
    if layout is None or not layout.blocks:
        raise NotImplementedError("its layers pass no further arguments to their attention")
    attended = [
        _attend(
            _gather(query, block.queries),
            _gather(key, block.keys),
            _gather(value, block.keys),
            _mask(block, attention_mask),
            scaling,
            softcap,
        )
        for block in layout.blocks
    ]
    flat = torch.cat([block.transpose(1, 2).flatten(0, 1) for block in attended])
    return flat.index_select(0, layout.restore)[None], None


_NOT_ATTENTION = {"cache_position", "position_ids", "sliding_window", "use_cache"}
"""Arguments that do not affect the result; the window arrives in place of the mask."""


def _gather(states: Tensor, indices: Tensor) -> Tensor:
    """Return [R, heads, L, D], the tokens of [1, heads, T, D] at indices [R, L]."""
    tokens = states[0].transpose(0, 1).index_select(0, indices.flatten())
    return torch.unflatten(tokens, 0, indices.shape).transpose(1, 2)


def _mask(block: Block, window: int | None) -> Tensor | None:
    """Return the mask of a block, without the keys outside the window."""
    num_keys = block.keys.shape[1]
    if window is None or window >= num_keys:
        return block.mask
    key_positions = torch.arange(num_keys, device=block.keys.device)
    distance = block.positions[:, None, :, None] - key_positions
    return (distance >= 0) & (distance < window)


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
    if mask is None and softcap is None:
        return scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=groups > 1
        )
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=key.device).tril()
        mask = mask[None, None]
    # Query heads that share a key head become further queries of one head, so that keys need not
    # be repeated.
    query = torch.unflatten(query, 1, (-1, groups)).flatten(2, 3)
    mask = mask[:, :, None].expand(-1, -1, groups, -1, -1).flatten(2, 3)
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
    scores = torch.tanh(query @ key.transpose(2, 3) * scale / softcap) * softcap
    scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value


def _window(*, local_size: int | None = None, **_: Any) -> int | None:
    """Return how many tokens a token sees, which the model passes to its layers as their mask."""
    return local_size


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, _window)


@contextmanager
def using_attention(config: PreTrainedConfig, name: str) -> Iterator[None]:
    """Switch the model of this config to a different attention within the context."""
    previous = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = previous


def same_attention(
    config: PreTrainedConfig,
) -> Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]]:
    """Return the ``context_fn`` that gradient checkpointing needs with packed attention.

    A layer that is recomputed in the backward pass then uses the attention of the forward pass.
    """
    return lambda: (nullcontext(), using_attention(config, config._attn_implementation))
