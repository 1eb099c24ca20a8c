"""Isolate what a library changes in the whole process: random number generators, environment
variables, hooks, threads and the default process group.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import group


class IsolatedProcessState:
    """A context with its own copy of the process's state.

    Changes within it are undone on exit, and restored when it is entered again. Within it, neither
    autocast nor a default device of the trainer applies.

    Args:
        env: Environment variables to set when it is first entered.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self._outside: list[Any] = []
        self._inside: list[Any] = []
        self._neutral = ExitStack()

    def __enter__(self) -> None:
        assert not self._outside, "entered twice"
        self._outside = _read_state()
        if self._inside:
            _restore_state(self._inside)
        else:
            os.environ.update(self._env)
        for context in _neutral_contexts():
            self._neutral.enter_context(context)

    def __exit__(self, *error: object) -> None:
        self._neutral.close()
        self._inside = _read_state()
        _restore_state(self._outside)
        self._outside = []


def _neutral_contexts() -> Iterator[AbstractContextManager[Any]]:
    """Yield what turns off the trainer's contexts that are active in this thread."""
    device = torch.get_default_device()
    if device.type != "cpu":
        yield torch.device("cpu")
    for kind in {device.type, "cpu", "cuda"}:
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            yield torch.autocast(kind, enabled=False)


def _read_state() -> list[Any]:
    return [read() for read, _ in ACCESSORS]


def _restore_state(state: list[Any]) -> None:
    for (_, restore), value in zip(ACCESSORS, state, strict=True):
        restore(value)


def _environment() -> dict[str, str]:
    return dict(os.environ)


def _set_environment(wanted: dict[str, str]) -> None:
    present = _environment()
    for name in present.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update(wanted.items() - present.items())


def _device_random_states() -> list[Tensor]:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []


def _set_num_threads(
    wanted: int, set_num_threads: Callable[[int], None] = torch.set_num_threads
) -> None:
    """Set the number with torch's own function, even if a library has replaced it since."""
    if torch.get_num_threads() != wanted:
        set_num_threads(wanted)


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return partial(getattr, owner, name), partial(setattr, owner, name)


ACCESSORS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
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
"""Functions that read and restore each piece of the state."""
