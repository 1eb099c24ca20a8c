"""A key-value cache that is written in place and whose rows can be removed.

The dynamic cache of ``transformers`` copies itself at every token and whenever a row is removed.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from lit_grpo.policy.named_weights import unwrap_peft
from lit_grpo.policy.packed.packed_attention import autocast
from lit_grpo.rollout.hf.compaction import Compaction
from lit_grpo.rollout.hf.shared_prompts import SharedPrompts

INITIAL_TOKENS = 64
"""Tokens allocated for completions at first. The capacity doubles when it is used up,
because allocating the longest possible completion at once is slow."""


def cache_name(model: torch.nn.Module) -> str:
    """Return the name under which the model takes its cache and returns it.

    ``transformers`` 5.24 renamed it; models that bring their own code keep the former name.
    """
    is_renamed = "cache" in inspect.signature(unwrap_peft(model).forward).parameters
    return "cache" if is_renamed else "past_key_values"


class RowLayer(DynamicLayer):
    """Keys and values of one layer, as views of larger buffers.

    Args:
        prefilled: The layer after the prompts.
        origin: [R] index of each row's prompt.
        max_tokens: Longest completion of a row.
        shares_prompts: Whether the rows have only their own tokens, without copies of the prompts.
    """

    def __init__(
        self, prefilled: DynamicLayer, origin: Tensor, max_tokens: int, *, shares_prompts: bool
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        assert prefilled.keys is not None
        assert prefilled.values is not None
        self._num_shared = prefilled.keys.shape[-2] if shares_prompts else 0
        own = (states[:, :, self._num_shared :] for states in (prefilled.keys, prefilled.values))
        self._buffers = autocast(*own)  # once, not at every token
        self.lazy_initialization(*self._buffers)
        self._num_rows, self._length = len(origin), self._buffers[0].shape[-2]
        self._max_length = self._length + max_tokens
        self._enlarge(origin)

    def get_seq_length(self) -> int:
        """Return the number of tokens so far, including a shared prompt's."""
        return self._num_shared + self._length

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        """Append the new tokens; return [R, heads, L, D] keys and values of all tokens so far."""
        start, self._length = self._length, self._length + key_states.shape[-2]
        if self._length > self._buffers[0].shape[-2]:
            self._enlarge(torch.arange(self._num_rows, device=key_states.device))
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[: self._num_rows, :, start : self._length] = states
        self._update_views()
        return self.keys, self.values

    def keep(self, moves: Compaction) -> None:
        """Keep only the rows that stay."""
        for buffer in self._buffers:
            moves.apply(buffer[:, :, : self._length])
        self._num_rows = moves.num_rows
        self._update_views()

    def _enlarge(self, rows: Tensor) -> None:
        old, used = self._buffers, min(self._length, self._buffers[0].shape[-2])
        capacity = min(self._max_length, max(INITIAL_TOKENS, used) + used)
        self._buffers = tuple(
            buffer.new_empty(len(rows), buffer.shape[1], capacity, buffer.shape[3])
            for buffer in old
        )
        for new, buffer in zip(self._buffers, old, strict=True):
            new[:, :, :used] = buffer[:, :, :used].index_select(0, rows)
        self._update_views()

    def _update_views(self) -> None:
        self.keys, self.values = (b[: self._num_rows, :, : self._length] for b in self._buffers)


def can_join(cache: DynamicCache) -> bool:
    """Return whether all layers keep keys and values only, and no state of their own."""
    return all(isinstance(layer, DynamicLayer) for layer in cache.layers)


def join_caches(caches: list[DynamicCache]) -> DynamicCache:
    """Return one cache for the rows of several, which `can_join` and have equally many tokens."""
    first, *others = caches
    for index, layer in enumerate(first.layers if others else ()):
        parts: list[Any] = [layer, *(one.layers[index] for one in others)]
        assert isinstance(layer, DynamicLayer)
        layer.keys = torch.cat([part.keys for part in parts])
        layer.values = torch.cat([part.values for part in parts])
    return first


class RowCache:
    """The cache of a running batch.

    Layers other than plain attention (sliding windows, state spaces) keep their own cache.

    Args:
        prefilled: The cache after the prompts.
        origin: [R] index of each row's prompt.
        max_tokens: Longest completion of a row.
        prompts: Gets the prompts of layers with plain attention, which all rows then share; None
            for rows with copies of their prompts.
    """

    def __init__(
        self,
        prefilled: DynamicCache,
        origin: Tensor,
        max_tokens: int,
        prompts: SharedPrompts | None = None,
    ) -> None:
        self.cache, self._prompts = prefilled, prompts
        self.is_plain = True
        """Whether every layer has plain attention."""
        for index, layer in enumerate(prefilled.layers):
            if type(layer) is DynamicLayer and layer.is_initialized:
                is_shared = prompts is not None
                prefilled.layers[index] = RowLayer(
                    layer, origin, max_tokens, shares_prompts=is_shared
                )
                if prompts is not None:
                    assert layer.keys is not None
                    assert layer.values is not None
                    prompts.add(index, layer.keys, layer.values)
            else:
                layer.reorder_cache(origin)  # type: ignore[arg-type]
                self.is_plain = False

    def drop(self, running: Tensor, device: torch.device) -> Tensor:
        """Remove the rows that are False in [R]; return the old index of each remaining row.

        Args:
            running: On the CPU, as is the result, so that the host waits for nothing.
            device: Device of the keys and values.
        """
        moves = Compaction(running, device)
        rows = moves.rows.to(device, non_blocking=True)
        for layer in self.cache.layers:
            if isinstance(layer, RowLayer):
                layer.keep(moves)
            else:
                layer.reorder_cache(rows)  # type: ignore[arg-type]
        if self._prompts is not None:
            self._prompts.keep(moves.rows)
        return moves.rows
