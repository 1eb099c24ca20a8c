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
        for storage in self._storages((args, kwargs)):
            if storage._cdata not in self._known:  # not made within
                self._know(storage)
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
        size = storage.nbytes()
        self._live += size
        self._know(storage, size)

    def _know(self, storage: torch.UntypedStorage, size: int = 0) -> None:
        """Take the storage for a known one until it is freed: another may get its address."""
        self._known.add(storage._cdata)
        weakref.finalize(storage, self._forget, storage._cdata, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._live -= size
