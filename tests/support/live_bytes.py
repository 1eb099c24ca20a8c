"""How many bytes of tensors live at the same time, counted as they are made and freed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Count the tensors that are made within; ``peak`` is the most bytes of them at a time.

    Args:
        counted: Returns the tensor to count for one that is made or read, or None.
    """

    def __init__(self, counted: Callable[[torch.Tensor], torch.Tensor | None] = lambda one: one):
        super().__init__()
        self.peak = self._live = 0
        self._counted = counted
        self._known: set[int] = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self._known |= {one._cdata for one in self._storages((args, kwargs))}
        result = operator(*args, **(kwargs or {}))
        for storage in self._storages(result):
            if storage._cdata not in self._known:
                self._add(storage)
        self.peak = max(self.peak, self._live)
        return result

    def _storages(self, tree: Any) -> list[torch.UntypedStorage]:
        tensors = [one for one in tree_leaves(tree) if isinstance(one, torch.Tensor)]
        counted = [one for one in map(self._counted, tensors) if one is not None]
        return [one.untyped_storage() for one in counted]

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self._live += size
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._live -= size
