"""What the tests of the judge share: a server on a real socket, and retries without long waits."""

from collections.abc import Iterator

import pytest
from judge_server import JudgeServer, shorten_backoff


@pytest.fixture(autouse=True)
def _short_backoff(monkeypatch):
    shorten_backoff(monkeypatch)


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with JudgeServer() as one:
        yield one
