"""What a library does to the whole process, kept apart from the rest of it: random numbers,
environment variables, hooks, threads, the default process group. Knows no vLLM.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import group


class IsolatedProcessState:
    """State of the process that only the inside of this context sees and changes.

    The inside finds again what it left behind, the outside what it had.

    Args:
        env: Environment variables of the inside, beside the process's own.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self._outside: list[Any] = []
        self._inside: list[Any] = []

    def __enter__(self) -> None:
        assert not self._outside, "entered twice"
        self._outside = _take()
        if self._inside:
            _put(self._inside)
        else:
            os.environ.update(self._env)

    def __exit__(self, *error: object) -> None:
        self._inside = _take()
        _put(self._outside)
        self._outside = []


def _take() -> list[Any]:
    return [take() for take, _ in PIECES]


def _put(state: list[Any]) -> None:
    for (_, put), value in zip(PIECES, state, strict=True):
        put(value)


def _environment() -> dict[str, str]:
    return dict(os.environ)


def _set_environment(wanted: dict[str, str]) -> None:
    present = _environment()
    for name in present.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update(wanted.items() - present.items())


def _device_random_states() -> list[Tensor]:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []


def _set_num_threads(wanted: int, really_set: Callable = torch.set_num_threads) -> None:
    """By what the function was before anybody replaced it."""
    if torch.get_num_threads() != wanted:
        really_set(wanted)


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return partial(getattr, owner, name), partial(setattr, owner, name)


PIECES: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
    (torch.get_rng_state, torch.set_rng_state),
    (_device_random_states, torch.cuda.set_rng_state_all),
    (_environment, _set_environment),
    _attribute(torch, "set_num_threads"),
    (torch.get_num_threads, _set_num_threads),
    _attribute(sys, "excepthook"),
    _attribute(group, "WORLD"),
]
"""What takes each piece of the state, and what puts it back."""
