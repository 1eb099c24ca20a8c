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

INITIAL_TOKENS = 64
"""Tokens allocated for completions at first. The capacity doubles when it is used up,
because allocating the longest possible completion at once is slow."""


def cache_name(model: torch.nn.Module) -> str:
    """Return the name under which the model takes its cache and returns it.

    ``transformers`` 5.24 renamed it; models that bring their own code keep the former name.
    """
    is_renamed = "cache" in inspect.signature(unwrap_peft(model).forward).parameters
    return "cache" if is_renamed else "past_key_values"


class RowLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values of one layer, as views of larger buffers.

    Args:
        prefilled: The layer after the prompts.
        origin: [R] index of each row's prompt.
        max_tokens: Longest completion of a row.
    """

    def __init__(self, prefilled: DynamicLayer, origin: Tensor, max_tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        assert prefilled.keys is not None
        assert prefilled.values is not None
        self.lazy_initialization(prefilled.keys, prefilled.values)
        self._buffers: tuple[Tensor, ...] = (prefilled.keys, prefilled.values)
        self._num_rows, self._length = len(origin), prefilled.keys.shape[-2]
        self._max_length = self._length + max_tokens
        self._enlarge(origin)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        """Append the new tokens; return [R, heads, L, D] keys and values of all tokens so far."""
        start, self._length = self._length, self._length + key_states.shape[-2]
        if self._length > self._buffers[0].shape[-2]:
            self._enlarge(torch.arange(self._num_rows, device=key_states.device))
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[: self._num_rows, :, start : self._length] = states
        self._update_views()
        return self.keys, self.values

    def keep(self, num_rows: int, targets: Tensor, sources: Tensor) -> None:
        """Move the source rows to the target places, then keep only the first rows."""
        for buffer in self._buffers:
            used = buffer[:, :, : self._length]
            used.index_copy_(0, targets, used.index_select(0, sources))
        self._num_rows = num_rows
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
    """Return one cache for the rows of several, if `can_join` and they have as many tokens."""
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
    """

    def __init__(self, prefilled: DynamicCache, origin: Tensor, max_tokens: int) -> None:
        self.cache = prefilled
        for index, layer in enumerate(prefilled.layers):
            if type(layer) is DynamicLayer and layer.is_initialized:
                prefilled.layers[index] = RowLayer(layer, origin, max_tokens)
            else:
                layer.reorder_cache(origin)  # type: ignore[arg-type]

    def drop(self, running: Tensor, device: torch.device) -> Tensor:
        """Remove the rows that are False in [R]; return the old index of each remaining row.

        Args:
            running: On the CPU, as is the result, so that the host waits for nothing.
            device: Of the keys and values.
        """
        places = torch.arange(len(running))
        num_rows = int(running.sum())
        targets = places[:num_rows][~running[:num_rows]]
        sources = places[num_rows:][running[num_rows:]]
        rows = places[:num_rows].clone()
        rows[targets] = sources
        moved = [one.to(device, non_blocking=True) for one in (targets, sources, rows)]
        for layer in self.cache.layers:
            if isinstance(layer, RowLayer):
                layer.keep(num_rows, moved[0], moved[1])
            else:
                layer.reorder_cache(moved[2])  # type: ignore[arg-type]
        return rows
