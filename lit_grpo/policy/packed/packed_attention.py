"""Attention within a pack, registered with `transformers` under the name ``packed``.

Attention is the only part of a transformer that is not token-wise. A model runs this one inside
`using_attention` and keeps its own everywhere else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig

from lit_grpo.policy.packed.block_attention import block_attention
from lit_grpo.policy.packed.merged_attention import merged_attention
from lit_grpo.policy.packed.pack_parts import Part, full_parts, window_parts
from lit_grpo.policy.packed.packing import Layout, Rows, pack
from lit_grpo.types import TokenBatch

log = logging.getLogger(__name__)

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
        attention_mask: Instead of a mask, the value of `_window`: how many tokens a token sees.

    Raises:
        NotImplementedError: the model needs a feature that is missing here, or passes no blocks.
    """
    unknown = {name for name, given in others.items() if given is not None} - _NOT_ATTENTION
    if unknown or dropout:
        raise NotImplementedError(f"its attention uses {', '.join(sorted(unknown)) or 'dropout'}")
    if layout is None or not layout.blocks:
        raise NotImplementedError("its layers pass no further arguments to their attention")
    query, key, value = autocast(query, key, value)
    if layout.rows is None or softcap is not None or not _can_merge(query, key, value):
        attended = block_attention(
            query, key, value, layout, window=attention_mask, scaling=scaling, softcap=softcap
        )
    else:
        parts, window = _parts(layout.rows, layout.derived, attention_mask, query.device)
        attended = merged_attention(query, key, value, parts, window=window, scaling=scaling)
    return attended, None


_NOT_ATTENTION = {"cache_position", "position_ids", "sliding_window", "use_cache"}
"""Arguments that do not affect the result; the window arrives instead of the mask."""


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as autocast does for torch's own attention, since a norm may have returned float32."""
    device_type = tensors[0].device.type
    has_autocast = torch.amp.is_autocast_available(device_type)
    if not (has_autocast and torch.is_autocast_enabled(device_type)):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(one if one.dtype == torch.float64 else one.to(dtype) for one in tensors)


def _parts(
    rows: Rows, derived: dict[Any, Any], window: int | None, device: torch.device
) -> tuple[list[Part], int | None]:
    """Return the parts, which are computed once for all layers, and the window if it hides any."""
    if window is not None and window >= int(rows.num_tokens.max()):
        window = None
    if window not in derived:
        with torch.device("cpu"):
            parts = full_parts(rows) if window is None else window_parts(rows, window)
        derived[window] = [part.to(device) for part in parts]
    return derived[window], window


def _can_merge(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the GPU has variable-length FlashAttention for these tensors."""
    heads, kv_heads, size = query.shape[1], key.shape[1], query.shape[-1]
    return (
        query.device.type in FLASH_DEVICES
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.dtype == key.dtype == value.dtype
        and size == value.shape[-1]
        and size % 8 == 0
        and size <= 256
        and _agrees(query.device, query.dtype, heads, kv_heads, size)
    )


FLASH_DEVICES = {"cuda"}
"""Types of devices that may have variable-length FlashAttention."""


@cache
def _agrees(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, size: int) -> bool:
    """Return whether `merged_attention` works here and agrees with `block_attention`.

    Its operators are private to torch and differ between devices, so each kind of tensors is tried
    once on a few tokens; if it fails, a warning is logged. This happens in another thread, free of
    the modes and hooks of autograd that may be active here.
    """
    with ThreadPoolExecutor(1) as thread:
        reason = thread.submit(_disagreement, device, dtype, heads, kv_heads, size).result()
    if reason is not None:
        log.warning(
            "%s cannot run variable-length FlashAttention on %s with %d heads of size %d (%s). "
            "Attention keeps a copy of the prompt's keys and values for every completion, which "
            "needs more memory.",
            *(device, dtype, heads, size, reason),
        )
    return reason is None


def _disagreement(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, size: int
) -> str | None:
    """Return why merged attention cannot be used, or None."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # a new thread's device is the first one
    packed = pack(_few_rows()).to(device)
    layout, num_tokens = packed.layout, packed.ids.shape[1]
    assert layout.rows is not None
    generator = torch.Generator().manual_seed(0)  # the run's own is left as it is
    query, key, value, grad = (
        torch.randn(1, count, num_tokens, size, generator=generator).to(device, dtype)
        for count in (heads, kv_heads, kv_heads, heads)
    )
    states = [one.requires_grad_() for one in (query, key, value)]
    grad = grad.transpose(1, 2)
    for window in (None, 2):
        blocks = block_attention(
            query, key, value, layout, window=window, scaling=None, softcap=None
        )
        plain = [blocks, *torch.autograd.grad(blocks, states, grad)]
        try:
            parts, _ = _parts(layout.rows, {}, window, device)
            merged = merged_attention(query, key, value, parts, window=window, scaling=None)
            ours = [merged, *torch.autograd.grad(merged, states, grad)]
        except (RuntimeError, TypeError, AttributeError) as error:
            return f"{type(error).__name__}: {error}"
        differences = list(map(_difference, ours, plain))
        if not all(one < 0.05 for one in differences):
            return f"it differs by {max(differences):.1g}"
    return None


def _difference(one: Tensor, other: Tensor) -> float:
    one, other = one.detach().float(), other.detach().float()
    return float((one - other).norm() / other.norm())


def _few_rows() -> TokenBatch:
    """Return two prompts; of the three completions of the first one two begin alike."""
    completions = torch.tensor([[6, 7, 8, 9], [6, 1, 0, 0], [2, 3, 4, 5], [7, 3, 4, 0]])
    return TokenBatch(
        prompt_ids=torch.tensor([[1, 2, 3], [0, 4, 5]]),
        prompt_mask=torch.tensor([[True, True, True], [False, True, True]]),
        prompt_index=torch.tensor([0, 0, 0, 1]),
        completion_ids=completions,
        completion_mask=completions > 0,
    )


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
