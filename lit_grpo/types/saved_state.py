"""The state of an object as a checkpoint can hold it: what a resume can read again."""

from __future__ import annotations

import io
from collections import Counter, OrderedDict
from collections.abc import Iterable
from types import NoneType
from typing import Any

import numpy as np
import torch

from lit_grpo.types.errors import UserError

ALLOW_CHANGES = (
    "add --allow_changes (in Python allow_changes=True to fit of lit_grpo.Trainer, or with another "
    "trainer module.allow_changes = True before it)"
)
"""How a run is resumed with settings that make it another one."""

_PLAIN = (NoneType, bool, int, float, complex, str, bytes)
_DICTS = (dict, OrderedDict, Counter)
_LISTS = (list, tuple, set)


def saved_state(key: str, state: Any) -> Any:
    """Return a copy of a state, with NumPy's numbers as plain ones and tensors without graphs.

    `torch.load` reads checkpoints without running code of theirs, and so refuses most classes.

    Args:
        key: What the state is of, for the message: ``callbacks.Mine``.

    Raises:
        UserError: it has a value that a resumed run could not read.
    """
    if isinstance(state, np.generic) and not isinstance(number := state.item(), np.generic):
        return saved_state(key, number)  # which refuses dates
    kind = type(state)
    if kind in _DICTS:
        return kind(_items(key, state.items()))
    if kind in _LISTS:
        return kind(
            one if type(one) in _PLAIN else saved_state(f"{key}.{n}", one)
            for n, one in enumerate(state)
        )
    if kind in (torch.Tensor, torch.nn.Parameter):
        return state.detach().clone()
    if kind is bytearray:
        return bytearray(state)
    if kind in _PLAIN or _is_readable(state):
        return state
    raise UserError(
        f"{key} must be a number, a string, a list, a dict or a tensor to be saved in a "
        f"checkpoint, got {kind.__module__}.{kind.__qualname__} (a resumed run could not read it). "
        "Convert it, for example a deque to a list, or leave it out."
    )


def _items(key: str, items: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    return {saved_state(key, k): saved_state(f"{key}.{k}", value) for k, value in items}


def _is_readable(value: Any) -> bool:
    if isinstance(value, torch.nn.Module):  # which may be large
        return False
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # pickle raises what an object's own methods do
        return False
    return True
