"""The benchmark of leaving: real runs that are sent a signal where it says."""

from __future__ import annotations

import signal

import pytest
from _benchmark import leaving


@pytest.mark.slow
def test_a_run_leaves_in_the_stage_that_is_named(monkeypatch):
    monkeypatch.setattr(leaving, "STEADY_SECONDS", 0.2)
    left = leaving.leave("it waits for a reward", 1)
    assert left.exit_code == 128 + signal.SIGTERM
    assert 0 < left.save_seconds < left.seconds


@pytest.mark.slow
def test_a_run_that_ends_by_itself_is_an_error_with_what_it_said(monkeypatch):
    place = ("generation", {"no_such_key": 1}, [])
    monkeypatch.setitem(leaving.PLACES, "it is broken", place)
    with pytest.raises(RuntimeError, match="no_such_key"):
        leaving.leave("it is broken", 1)
