"""Waits of a single rank; `tests/end_to_end/test_stops_of_ranks.py` has those of several."""

import pickle
import time

import pytest

from lit_grpo.rollout import EngineFailed
from lit_grpo.stopping import ExitCode
from lit_grpo.training import waiting
from lit_grpo.training.waiting import RankWaits, StepAbandoned, abandon_if_failed, wait_until_done
from lit_grpo.types.errors import EngineBug


class Events:
    """What asks the callbacks: one of them ends the run when it is asked so many times."""

    def __init__(self, *, ends_at: int = 10**9):
        self.ends_at = ends_at
        self.num_asked = 0
        self.is_paused = False
        self.was_paused: list[bool] = []

    def is_stop_requested(self) -> bool:
        self.num_asked += 1
        self.was_paused.append(self.is_paused)
        return self.num_asked >= self.ends_at


class DoneAfter:
    """A wait that is over after so many rounds."""

    def __init__(self, num_rounds: int):
        self.num_rounds = num_rounds
        self.given: list[float] = []

    def __call__(self, seconds: float) -> bool:
        self.given.append(seconds)
        return len(self.given) == self.num_rounds


def test_callbacks_are_asked_between_the_rounds_of_a_wait():
    events, wait = Events(), DoneAfter(3)
    RankWaits(events).until_done(wait)
    assert wait.given == [waiting.POLL_SECONDS] * 3
    assert events.num_asked == 2


def test_a_wait_is_left_when_a_callback_ends_the_run():
    wait = DoneAfter(9)
    with pytest.raises(StepAbandoned, match="Ended by a callback while the run waited") as caught:
        RankWaits(Events(ends_at=2)).until_done(wait)
    assert len(wait.given) == 2
    reason = caught.value.reason
    assert (reason.exit_code, reason.is_step_unfinished) == (ExitCode.SCORES_ABSENT, True)


def test_a_wait_that_is_over_asks_nobody():
    events = Events(ends_at=1)
    RankWaits(events).until_done(DoneAfter(1))
    assert events.num_asked == 0
    wait_until_done(wait := DoneAfter(3))
    assert len(wait.given) == 3


def test_a_pause_takes_its_time_and_is_known_until_it_ends(monkeypatch):
    monkeypatch.setattr(waiting, "POLL_SECONDS", 0.02)
    events, start = Events(), time.monotonic()
    RankWaits(events).pause(0.05)
    assert time.monotonic() - start >= 0.05
    assert events.was_paused
    assert all(events.was_paused)
    assert not events.is_paused


def test_a_pause_that_a_callback_ends_is_no_longer_one(monkeypatch):
    monkeypatch.setattr(waiting, "POLL_SECONDS", 0.001)
    events = Events(ends_at=2)
    with pytest.raises(StepAbandoned):
        RankWaits(events).pause(600)
    assert events.was_paused == [True, True]
    assert not events.is_paused


def test_a_rank_that_works_asks_the_callbacks_as_well():
    RankWaits(events := Events()).join_round()
    assert events.num_asked == 1
    with pytest.raises(StepAbandoned):
        RankWaits(Events(ends_at=1)).join_round()


def test_a_step_is_abandoned_if_its_engine_gave_up():
    abandon_if_failed(None)
    with pytest.raises(StepAbandoned, match="^Stopped: no server is left$") as caught:
        abandon_if_failed(EngineFailed("no server is left"))
    assert caught.value.reason.exit_code == ExitCode.ENGINE_FAILED


def test_an_error_that_other_ranks_could_not_read_abandons_the_step(monkeypatch):
    class OfTheUser(EngineFailed):  # pickle does not find the class
        pass

    def over_ranks(failure):
        return pickle.loads(pickle.dumps(failure))

    monkeypatch.setattr(waiting, "any_failure", over_ranks)
    with pytest.raises(StepAbandoned, match="^Stopped: no server is left$"):
        abandon_if_failed(OfTheUser("no server is left"))


def test_a_step_is_abandoned_as_crashed_if_its_engine_has_a_bug():
    with pytest.raises(StepAbandoned, match="^Stopped: row 0 twice$") as caught:
        abandon_if_failed(EngineBug("row 0 twice"))
    assert caught.value.reason.exit_code == ExitCode.CRASHED
