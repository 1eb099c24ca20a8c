from collections.abc import Iterator

import pytest
from forked_ranks import Importer, imported
from left_runs import WITH_SUPPORT


@pytest.fixture(scope="session")
def importer() -> Iterator[Importer]:
    with imported(DS_ACCELERATOR="cpu", **WITH_SUPPORT) as process:
        yield process
