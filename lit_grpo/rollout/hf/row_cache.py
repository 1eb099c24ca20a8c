"""A key-value cache whose rows can leave: written in place, with a row moved instead of all copied.

`transformers`' own dynamic cache is copied whole at every token and at every row that leaves.
Never samples and never calls a model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

FIRST_ROOM = 64
"""Tokens that a row has room for at first; the room doubles when it is full, up to the most that
it can need: memory that is never written costs time, too."""


class RowLayer(DynamicLayer):
    """Keys and values of one layer, as views of larger buffers.

    Args:
        prefilled: The layer after the prompts.
        origin: [R] the prompt of each row.
        max_tokens: The most that a row takes behind its prompt.
    """

    def __init__(self, prefilled: DynamicLayer, origin: Tensor, max_tokens: int) -> None:
        super().__init__()
        assert prefilled.keys is not None
        assert prefilled.values is not None
        self.lazy_initialization(prefilled.keys, prefilled.values)
        self._buffers: tuple[Tensor, ...] = (prefilled.keys, prefilled.values)
        self._num_rows, self._length = len(origin), prefilled.keys.shape[-2]
        self._most = self._length + max_tokens
        self._enlarge(origin)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        """Write the new tokens behind the others; [R, heads, L, D] of all tokens so far."""
        start, self._length = self._length, self._length + key_states.shape[-2]
        if self._length > self._buffers[0].shape[-2]:
            self._enlarge(torch.arange(self._num_rows, device=key_states.device))
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[: self._num_rows, :, start : self._length] = states
        self._look()
        return self.keys, self.values

    def keep(self, num_rows: int, targets: Tensor, sources: Tensor) -> None:
        """Move rows into the places of rows that left, and forget all behind the first few."""
        for buffer in self._buffers:
            used = buffer[:, :, : self._length]
            used.index_copy_(0, targets, used.index_select(0, sources))
        self._num_rows = num_rows
        self._look()

    def _enlarge(self, rows: Tensor) -> None:
        old, used = self._buffers, min(self._length, self._buffers[0].shape[-2])
        room = min(self._most, max(FIRST_ROOM, used) + used)
        self._buffers = tuple(
            buffer.new_empty(len(rows), buffer.shape[1], room, buffer.shape[3]) for buffer in old
        )
        for new, buffer in zip(self._buffers, old, strict=True):
            new[:, :, :used] = buffer[:, :, :used].index_select(0, rows)
        self._look()

    def _look(self) -> None:
        self.keys, self.values = (b[: self._num_rows, :, : self._length] for b in self._buffers)


class RowCache:
    """The cache of a running batch.

    Layers of another kind than plain attention (sliding windows, state spaces) stay as they are.

    Args:
        prefilled: What the model made of the prompts.
        origin: [R] the prompt of each row.
        max_tokens: The most that a row takes behind its prompt.
    """

    def __init__(self, prefilled: DynamicCache, origin: Tensor, max_tokens: int) -> None:
        self.cache = prefilled
        for index, layer in enumerate(prefilled.layers):
            if type(layer) is DynamicLayer and layer.is_initialized:
                prefilled.layers[index] = RowLayer(layer, origin, max_tokens)
            else:
                layer.reorder_cache(origin)  # type: ignore[arg-type]

    def drop(self, running: Tensor) -> Tensor:
        """Forget the rows that are False in [R]; returns [running rows] which row each now is."""
        places = torch.arange(len(running), device=running.device)
        num_rows = int(running.sum())
        targets = places[:num_rows][~running[:num_rows]]
        sources = places[num_rows:][running[num_rows:]]
        now = places[:num_rows].clone()
        now[targets] = sources
        for layer in self.cache.layers:
            if isinstance(layer, RowLayer):
                layer.keep(num_rows, targets, sources)
            else:
                layer.reorder_cache(now)  # type: ignore[arg-type]
        return now
