import gc
import signal
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from forked_ranks import Importer, imported
from hypothesis import settings

torch.set_num_threads(1)
# Other work on the machine decides how long an example takes.
settings.register_profile("without deadline", deadline=None)
settings.load_profile("without deadline")


def pytest_sessionstart() -> None:
    gc.disable()  # nothing that is imported becomes garbage


def pytest_collection_finish() -> None:
    gc.freeze()  # nor is it scanned again, even in forked processes
    gc.enable()


@pytest.hookimpl(trylast=True)  # of those that are left
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with many (slow) tests first, so that no worker is left with one at the end."""
    num_slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    num_tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (num_slow[item.path], num_tests[item.path]), reverse=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Let the test fail that leaves gradients turned off, and not one after it."""
    yield
    if not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        pytest.fail(f"{item.nodeid} leaves gradients turned off")


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a background job; children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, whatever handler the test runner or Lightning has set."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # Hypothesis is called by it, and there Python drops the exception
    yield
    gc.enable()
    torch.set_grad_enabled(True)  # the exception may come where torch.no_grad is about to end
    signal.signal(signal.SIGINT, previous)


@pytest.fixture(scope="session")
def importer() -> Iterator[Importer]:
    """Return the process from which others are forked."""
    with imported() as process:
        yield process
