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
        self._growing: list[dict[int, int]] = []
        """Tokens so far of each unfinished sample of each request."""

    @contextmanager
    def using(self, version: int) -> Iterator[None]:
        """Mark a version as in use, so that its files and adapters are kept until the end."""
        self._users[version] += 1
        try:
            yield
        finally:
            self._users[version] -= 1

    @contextmanager
    def growing(self) -> Iterator[dict[int, int]]:
        """Yield where to note the tokens so far of each unfinished sample of a request."""
        num_tokens: dict[int, int] = {}
        self._growing.append(num_tokens)
        try:
            yield num_tokens
        finally:
            self._growing = [one for one in self._growing if one is not num_tokens]

    @property
    def num_unfinished_tokens(self) -> int:
        """Tokens of completions that are not finished; read by other threads as well."""
        return sum(sum(list(one.values())) for one in list(self._growing))

    @property
    def versions_in_use(self) -> set[int]:
        """Versions that unfinished requests of this rank, or a running update, started with."""
        return {version for version, number in self._users.items() if number}
