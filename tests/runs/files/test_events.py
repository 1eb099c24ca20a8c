from __future__ import annotations

import errno

import pytest
from lightning.pytorch.callbacks import Callback, LambdaCallback
from toy_rollouts import fit, outputs, rollouts

from lit_grpo.callbacks import Checkpoints, ZeroRewardBreaker
from lit_grpo.diagnostics.causes.table import CAUSES
from lit_grpo.runs.files.events import EventsFile, read_events, record_event
from lit_grpo.stopping import ExitCode, stop_run
from lit_grpo.training.stages import StageEvents
from lit_grpo.types import StopReason

STEP = outputs(rollouts([[0.0, 1.0]]))
ZERO = outputs(rollouts([[0.0, 0.0]]))


def kinds(directory):
    return [(event.kind, event.step) for event in read_events(directory)]


def test_a_run_that_is_done_has_a_start_and_an_end(tmp_path):
    fit(lambda step: STEP, [EventsFile(tmp_path)], steps=3)
    assert kinds(tmp_path) == [("start", 0), ("done", 3)]
    assert read_events(tmp_path)[-1].message == "done after optimizer step 3: max_steps is reached"


def test_a_secret_that_has_changed_is_not_recorded(tmp_path):
    def give(trainer, module):
        module.changes = ["model.rewards.0.api_key: sk-1 -> sk-2"]

    fit(lambda step: STEP, [LambdaCallback(on_fit_start=give), EventsFile(tmp_path)], steps=1)
    told = ["model.rewards.0.api_key: (removed) -> (removed)"]
    assert read_events(tmp_path)[0].changes == told


def test_a_stop_is_recorded_with_its_reason(tmp_path):
    fit(lambda step: ZERO, [ZeroRewardBreaker(1, 2), EventsFile(tmp_path)], steps=9)
    *_, last = read_events(tmp_path)
    assert (last.kind, last.step) == ("stop", 2)
    assert last.message.startswith("No reward for 2 rollout steps in a row")


def test_a_stopped_run_that_has_nothing_left_to_train_is_done(tmp_path):
    def run(*callbacks, **options):
        saving = Checkpoints(dirpath=str(tmp_path / "checkpoints"))
        fit(lambda step: STEP, [*callbacks, EventsFile(tmp_path), saving], steps=1, **options)

    run(Stop(ExitCode.TIME_IS_UP))
    for _ in range(2):
        run(ckpt_path=tmp_path / "checkpoints" / "last.ckpt")
        assert kinds(tmp_path) == [("start", 0), ("stop", 1), ("done", 1)]


def test_a_crash_is_recorded_with_its_error(tmp_path):
    with pytest.raises(ZeroDivisionError):
        fit(lambda step: 1 // 0, [EventsFile(tmp_path)], steps=1)
    *_, last = read_events(tmp_path)
    assert (last.kind, last.message, last.cause) == (
        "crash",
        "ZeroDivisionError: integer division or modulo by zero",
        "crashed",
    )


def test_ctrl_c_at_a_python_prompt_is_recorded_in_words(tmp_path):
    def step(number):
        raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(step, [EventsFile(tmp_path)], steps=1)
    *_, last = read_events(tmp_path)
    assert (last.kind, last.cause) == ("crash", "signal")
    assert last.message == "Ended by SIGINT, without a new checkpoint."


class Stop(Callback):
    def __init__(self, exit_code, cause=""):
        self.reason = StopReason(exit_code=exit_code, message="Enough.", cause=cause)

    def on_train_batch_end(self, trainer, *args):
        stop_run(trainer, self.reason)


@pytest.mark.parametrize(
    ("stop", "cause"),
    [
        (Stop(ExitCode.SCORES_ABSENT), "score_outage"),
        (Stop(ExitCode.SCORES_ABSENT, "engine_outage"), "engine_outage"),
        (Stop(143), "signal"),
        (Stop(20), "exit_code_20"),
    ],
    ids=["by its exit code", "by its own cause", "a signal", "of the user's"],
)
def test_a_stop_has_a_cause_of_the_table(tmp_path, stop, cause):
    fit(lambda step: STEP, [stop, EventsFile(tmp_path)], steps=2)
    *_, last = read_events(tmp_path)
    assert (last.kind, last.message, last.cause) == ("stop", "Enough.", cause)
    assert cause in CAUSES or cause == "exit_code_20"


def test_a_crash_on_a_full_disk_has_that_cause(tmp_path):
    def step(number):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        fit(step, [EventsFile(tmp_path)], steps=1)
    *_, last = read_events(tmp_path)
    assert last.cause == "disk_full"


def test_callbacks_add_events_with_a_cause(tmp_path):
    class Alerting(Callback):
        def on_train_batch_end(self, trainer, *args):
            record_event(trainer, "alert", "Kürzer", "truncated")

    fit(lambda step: STEP, [Alerting(), EventsFile(tmp_path)], steps=1)
    alert = read_events(tmp_path)[1]
    assert (alert.kind, alert.step, alert.message, alert.cause) == (
        "alert",
        1,
        "Kürzer",
        "truncated",
    )


def test_an_outage_that_is_waited_out_is_an_alert_with_its_cause(tmp_path):
    class Waits(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            StageEvents(pl_module).report_outage("score_outage", "The judge does not answer.")

    fit(lambda step: STEP, [Waits(), EventsFile(tmp_path)], steps=1)
    alert = read_events(tmp_path)[1]
    assert (alert.kind, alert.cause) == ("alert", "score_outage")
    assert alert.message == "The judge does not answer."


def test_a_line_that_was_cut_short_is_left_out(tmp_path):
    fit(lambda step: STEP, [EventsFile(tmp_path)], steps=1)
    path = tmp_path / "events.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert kinds(tmp_path) == [("start", 0)]
