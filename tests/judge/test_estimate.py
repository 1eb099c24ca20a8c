"""The limit that holds calls up most decides how long they take."""

from __future__ import annotations

import pytest

from lit_grpo.judge import Limits
from lit_grpo.judge.estimate import seconds_of_calls


@pytest.mark.parametrize(
    ("limits", "seconds"),
    [
        ({}, 32.0),
        ({"requests_per_minute": 30}, 128.0),
        ({"tokens_per_minute": 6400}, 60.0),
        ({"requests_per_minute": 300, "tokens_per_minute": 64_000}, 32.0),
    ],
)
def test_seconds_of_64_calls_of_2_seconds(limits, seconds):
    assert seconds_of_calls(Limits(max_concurrency=4, **limits), 64, 6400, 2.0) == seconds
