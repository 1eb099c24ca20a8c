"""Counts, times and rates of a run, with a clock that the tests set."""

import pytest

from lit_grpo.runs.progress import run_progress
from lit_grpo.runs.progress.run_progress import RunProgress, TokenRate
from lit_grpo.types import RunningStage, StageProgress


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(run_progress.time, "perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return Clock(monkeypatch)


def stage(name, started, **counts):
    return RunningStage(name=name, started=started, progress=lambda: StageProgress(**counts))


def progress(running=None, *, num_done=0, total=10, is_paused=False):
    return RunProgress(
        "Training", "step", num_done, total, lambda: running, is_paused=lambda: is_paused
    )


def test_time_left_runs_down_within_a_step_and_never_below_the_steps_after_it(clock):
    one = progress(total=4)
    assert one.clock == "0:00:00 • -:--:--"
    one.begin_step()
    for num_done in (1, 2):
        clock.now += 30
        one.end_step(num_done, 4)
    assert (one.count, one.speed, one.time_left) == ("2/4", "30.00 s/step", "0:01:00")
    clock.now += 10
    assert one.clock == "0:01:10 • 0:00:50"
    clock.now += 100  # a step that takes longer than the others
    assert one.time_left == "0:00:30"


def test_a_run_without_an_end_has_no_time_left(clock):
    one = progress(total=float("inf"))
    one.begin_step()
    clock.now += 1
    one.end_step(1, float("inf"))
    assert (one.count, one.time_left) == ("1/--", "")


def test_a_stage_shows_its_count_its_time_and_its_rate(clock):
    counts = {"num_done": 37, "total": 128, "num_tokens": 0}
    one = progress(stage("generation", 100.0, **counts))
    assert one.doing() == "generate 37/128"
    clock.now += 2
    counts |= {"num_done": 38, "num_tokens": 500}
    one = progress(RunningStage(name="x", started=100.0, progress=lambda: StageProgress(**counts)))
    one.doing()
    clock.now += 2
    counts["num_tokens"] = 1500
    assert one.doing() == "x 38/128  0:00:04  500 tok/s"


@pytest.mark.parametrize(
    ("name", "verb"),
    [
        *(("weight_sync", "sync weights"), ("generation", "generate"), ("reward", "score")),
        *(("logprob", "logprobs"), ("update", "update"), ("evaluation", "validate")),
    ],
)
def test_every_stage_of_a_step_has_its_verb(name, verb, clock):
    assert progress(stage(name, 100.0)).doing().startswith(verb)


def test_what_the_run_does_besides_a_step_comes_first(clock):
    one = progress(stage("update", 100.0))
    one.activity = "saving a checkpoint"
    assert one.doing() == "saving a checkpoint"
    one.begin_step()
    assert one.doing() == "update"


def test_a_pause_until_missing_scores_are_tried_again_is_told_in_place_of_the_count(clock):
    reward = stage("reward", 100.0, num_done=16, total=16)
    clock.now += 72
    assert progress(reward).doing() == "score 16/16  0:01:12"
    assert progress(reward, is_paused=True).doing() == "waiting for missing scores  0:01:12"


def test_a_validation_in_several_batches_says_which_one_runs(clock):
    one = progress(stage("evaluation", 100.0, num_done=3, total=64))
    one.begin_validation(1, 4)
    assert one.doing() == "validate 3/64 (batch 2/4)"
    one.begin_validation(0, 1)
    assert one.doing() == "validate 3/64"


def test_a_rate_forgets_what_is_long_ago_and_starts_anew_with_each_stage(clock):
    rate = TokenRate()
    assert rate.update("generation", 0) == 0.0
    for num_tokens in (1000, 1100, 1200):
        clock.now += 20
        latest = rate.update("generation", num_tokens)
    assert latest == 5.0  # of the last 20 s
    assert rate.update("generation", 10) == 0.0  # the next step
    clock.now += 1
    assert rate.update("generation", 30) == 20.0
    assert rate.update("evaluation", 40) == 0.0
