"""The completions that a server is working on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class ServerLoad:
    """Counts of a server's completions, and of the weights that they use."""

    def __init__(self) -> None:
        self.num_running = 0
        """Completions assigned to the server and not finished."""
        self.last_token_time = 0.0
        """Event loop time at which the server last streamed something."""
        self._users: Counter[int] = Counter()

    @contextmanager
    def using(self, version: int) -> Iterator[None]:
        """Mark a version as in use, so that its files and adapters are kept until the end."""
        self._users[version] += 1
        try:
            yield
        finally:
            self._users[version] -= 1

    @property
    def versions_in_use(self) -> set[int]:
        """Versions that unfinished requests of this rank, or a running update, started with."""
        return {version for version, number in self._users.items() if number}
