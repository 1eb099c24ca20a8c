"""What the tests of ``lit-grpo precompute`` share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from judge_server import JudgeServer
from stored_answers import by_last_letter, write_recipe, write_rows


@pytest.fixture
def server(here) -> Iterator[JudgeServer]:
    """A judge, and 20 rows with a recipe that names it."""
    with JudgeServer(by_last_letter) as server:
        write_rows(20)
        write_recipe(server)
        yield server
