"""Keep the Hub's libraries offline, or let them not wait for a Hub that does not answer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from huggingface_hub import constants, get_session
from huggingface_hub.errors import OfflineModeIsEnabled

TIMEOUT_SECONDS = 5.0


def use_of_the_hub(*, is_offline: bool) -> AbstractContextManager[None]:
    """Return the context of a command that reads from the Hub, or only from its caches."""
    return without_the_hub() if is_offline else asking_the_hub_once()


@contextmanager
def without_the_hub() -> Iterator[None]:
    """Let the libraries of the Hub use only their caches within the context."""
    with _offline_restored():
        _set_offline(True)
        yield


@contextmanager
def asking_the_hub_once() -> Iterator[None]:
    """Find out at the first request within the context whether the Hub answers at all.

    If it does not, its libraries use only their caches from then on. They would ask for each file
    again and again, for half a minute.
    """
    session: Any = get_session()
    hooks = session.event_hooks
    has_asked = False

    def ask(_: object) -> None:
        nonlocal has_asked
        if has_asked:
            return
        has_asked = True
        try:
            session.head(constants.ENDPOINT, timeout=TIMEOUT_SECONDS)
        except Exception as error:  # httpx's errors, or those of its successor
            _set_offline(True)
            raise OfflineModeIsEnabled(f"{constants.ENDPOINT} does not answer") from error

    session.event_hooks = hooks | {"request": [*hooks["request"], ask]}
    try:
        with _offline_restored():
            yield
    finally:
        session.event_hooks = hooks


@contextmanager
def _offline_restored() -> Iterator[None]:
    before = constants.HF_HUB_OFFLINE
    try:
        yield
    finally:
        _set_offline(before)


def _set_offline(value: bool) -> None:
    constants.HF_HUB_OFFLINE = value
    if datasets := sys.modules.get("datasets"):  # it copies the switch when it is imported
        datasets.config.HF_HUB_OFFLINE = datasets.config.HF_DATASETS_OFFLINE = value
