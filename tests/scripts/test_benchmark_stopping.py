"""The benchmark of stopping: real runs that get a signal at a known place."""

from __future__ import annotations

import signal

import pytest
from _benchmark import stopping


@pytest.mark.slow
def test_a_run_stops_in_the_stage_that_is_named(monkeypatch):
    monkeypatch.setattr(stopping, "STEADY_SECONDS", 0.2)
    stopped = stopping.stop("it waits for a reward", 1)
    assert stopped.exit_code == 128 + signal.SIGTERM
    assert 0 < stopped.save_seconds < stopped.seconds


@pytest.mark.slow
def test_a_run_that_ends_by_itself_is_an_error_with_what_it_said(monkeypatch):
    place = ("generation", {"no_such_key": 1}, [])
    monkeypatch.setitem(stopping.PLACES, "it is broken", place)
    with pytest.raises(RuntimeError, match="no_such_key"):
        stopping.stop("it is broken", 1)
