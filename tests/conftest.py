import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest tests first, so that no worker is left with one when the others are done."""
    items.sort(key=_minutes, reverse=True)


def _minutes(item: pytest.Item) -> float:
    """Return how long a test takes, roughly: one minute for a slow one that does not say."""
    mark = item.get_closest_marker("slow")
    return 0.0 if mark is None else float(mark.kwargs.get("minutes", 1.0))
