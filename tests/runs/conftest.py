"""What the tests of runs share."""

import signal
from collections.abc import Iterator

import pytest
from parsers import parsers  # noqa: F401


@pytest.fixture
def without_nohup() -> Iterator[None]:
    """SIGHUP ends a process, whatever the test runner was started with."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
