"""Runs that end before their time is up."""

import time
from datetime import datetime, timedelta
from types import SimpleNamespace

import pytest
from lightning.pytorch.callbacks import Timer, timer
from toy_rollouts import fit, outputs, rollouts

from lit_grpo.callbacks import Checkpoints
from lit_grpo.runs.shutdown import time_limit
from lit_grpo.runs.shutdown.time_limit import StopAtTimeLimit, requeue_if_asked, with_more_time
from lit_grpo.stopping import ExitCode, get_stop_reason
from lit_grpo.types import Stage

STEP = outputs(rollouts([[0.0, 1.0]]))


def at(seconds: float) -> str:
    return (datetime.now() + timedelta(seconds=seconds)).isoformat()


def train(*callbacks, steps=4, clock=None, **options):
    """Train; a clock goes on by 1.1 seconds at each step."""

    def step(number):
        if clock is not None:
            clock.now += 1.1
        return STEP

    return fit(step, list(callbacks), steps=steps, **options)


@pytest.fixture
def clock(monkeypatch):
    """The clock of ``max_time``, which goes on only where a test says so."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(timer, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.fixture
def requeued(monkeypatch):
    """What was queued again."""
    calls = []
    monkeypatch.setattr(time_limit, "requeue_job", lambda: calls.append("job"))
    return calls


def test_a_run_leaves_by_a_time_with_a_checkpoint_and_queues_its_job_again(tmp_path, requeued):
    limit = StopAtTimeLimit(at(30), requeue=True)
    trainer = train(limit, Checkpoints(dirpath=str(tmp_path)))
    reason = get_stop_reason(trainer)
    assert (reason.exit_code, trainer.global_step) == (ExitCode.TIME_IS_UP, 1)
    assert reason.message.startswith("Ended after 1 rollout step: leave_by is 20")
    assert (tmp_path / "last.ckpt").exists()
    requeue_if_asked(trainer)
    assert requeued == ["job"]


def test_the_longest_update_and_twice_the_longest_checkpoint_must_fit():
    saving = Checkpoints()
    saving.longest_save = 100.0
    limit = StopAtTimeLimit(at(400))
    for seconds, is_due in ((100.0, False), (150.0, True)):
        limit.on_train_batch_start(None, None, None, 0)
        for name in ("generation", "logprob", "update"):
            stage = Stage(name=name, seconds=seconds / 2)
            limit.on_stage_end(None, None, stage)
        why = limit._why_limit(type("Trainer", (), {"callbacks": [saving]})())
        assert bool(why) == is_due


def test_max_time_ends_a_run_with_its_reason_and_does_not_queue_it_again(tmp_path, requeued, clock):
    limit = StopAtTimeLimit(requeue=True)
    saving = Checkpoints(dirpath=str(tmp_path))
    trainer = train(limit, saving, clock=clock, max_time={"seconds": 1})
    reason = get_stop_reason(trainer)
    assert (reason.exit_code, trainer.global_step) == (ExitCode.TIME_IS_UP, 1)
    assert "after 1 rollout step: trainer.max_time is reached (0:00:01 for all" in reason.message
    assert (tmp_path / "last.ckpt").exists()
    requeue_if_asked(trainer)
    assert requeued == []

    ckpt = tmp_path / "last.ckpt"
    resumed = train(StopAtTimeLimit(), clock=clock, ckpt_path=ckpt, max_time={"seconds": 1})
    assert get_stop_reason(resumed).message.startswith("Nothing was trained: trainer.max_time is")
    longer = train(StopAtTimeLimit(), clock=clock, ckpt_path=ckpt, steps=2, max_time={"minutes": 9})
    assert (get_stop_reason(longer), longer.global_step) == (None, 2)


def test_a_job_in_which_no_step_was_finished_is_not_queued_again(requeued, caplog):
    trainer = train(limit := StopAtTimeLimit(at(30), requeue=True))
    limit._first_step = 1
    requeue_if_asked(trainer)
    assert requeued == []
    assert "not queued again: it has finished no rollout step" in caplog.text


def test_the_end_of_a_slurm_job_is_a_limit_unless_it_is_refused(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 30))
    assert "the SLURM job ends at" in get_stop_reason(train(StopAtTimeLimit())).message
    assert get_stop_reason(train(StopAtTimeLimit("never"), steps=1)) is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("tomorrow", r"leave_by must be auto, never, or a time such as .*, got tomorrow"),
        ("2020-01-01T08:00", r"leave_by must be in the future, got 2020-01-01T08:00 \(it is 2"),
    ],
)
def test_a_time_that_is_none_or_has_passed_is_refused(value, message):
    with pytest.raises(ValueError, match=message):
        StopAtTimeLimit(value)


def test_a_run_that_has_used_up_its_time_is_resumed_with_more():
    used = Timer("01:00:00:10")
    trainer = SimpleNamespace(callbacks=[used])
    assert with_more_time("lit-grpo fit run", trainer) == "lit-grpo fit run"
    used.load_state_dict({"time_elapsed": {"train": 90_000.0}})
    expected = "lit-grpo fit run --trainer.max_time 02:00:00:20"
    assert with_more_time("lit-grpo fit run", trainer) == expected
