from types import SimpleNamespace

import lightning as L
import pytest
import torch
from small_runs import fit, make_module

from lit_grpo.training import stages
from lit_grpo.training.stages import StageEvents
from lit_grpo.types import StageProgress
from lit_grpo.types.errors import OutOfMemory


class Listener(L.Callback):
    """Records the stages that are reported."""

    def __init__(self):
        self.started, self.ended = [], []

    def on_stage_start(self, trainer, pl_module, name):
        self.started.append(name)

    def on_stage_end(self, trainer, pl_module, stage):
        self.ended.append(stage)


class StopsWhileWaiting(L.Callback):
    def on_wait(self, trainer, pl_module, _):
        trainer.should_stop = True


def events_for(*callbacks):
    """The events of a module that is not trained."""
    trainer = SimpleNamespace(
        callbacks=[L.Callback(), *callbacks],
        should_stop=False,
        state=SimpleNamespace(fn="fit"),
        validating=False,
    )
    return StageEvents(SimpleNamespace(trainer=trainer, device=torch.device("cpu")))


def test_a_stage_is_reported_with_its_details_to_the_callbacks_that_listen():
    listener = Listener()
    with events_for(listener).stage("micro_batch", 3) as details:
        details["rows"] = 5
        assert listener.started == ["micro_batch"]
        assert listener.ended == []
    (stage,) = listener.ended
    assert (stage.name, stage.micro_batch, stage.details) == ("micro_batch", 3, {"rows": 5})
    assert stage.seconds > 0


def test_a_stage_that_fails_is_not_reported_as_ended():
    listener = Listener()
    with pytest.raises(ZeroDivisionError), events_for(listener).stage("reward"):
        raise ZeroDivisionError
    assert (listener.started, listener.ended) == (["reward"], [])


def test_callbacks_may_end_the_run_while_it_waits():
    assert not events_for(Listener()).is_stop_requested()
    assert events_for(Listener(), StopsWhileWaiting()).is_stop_requested()


def test_a_plain_stop_does_not_end_the_validation_that_it_causes():
    events = events_for(StopsWhileWaiting())
    events._module.trainer.validating = True
    assert not events.is_stop_requested()


def test_a_step_reports_its_stages_in_order_and_every_row_once():
    listener = Listener()
    fit(make_module(update={"max_tokens_per_micro_batch": 60}), callbacks=[listener])
    assert list(dict.fromkeys(listener.started)) == [
        "weight_sync",
        "generation",
        "reward",
        "logprob",
        "update",
        "micro_batch",
    ]
    parts = [stage for stage in listener.ended if stage.name == "micro_batch"]
    assert [stage.micro_batch for stage in parts] == list(range(len(parts)))
    assert len(parts) > 1
    assert sum(stage.details["rows"] for stage in parts) == 16
    assert listener.ended[-1].name == "update"
    assert listener.ended[-1].seconds >= sum(stage.seconds for stage in parts)


def test_the_micro_batches_of_all_optimizer_steps_of_a_rollout_step_have_one_numbering():
    listener = Listener()
    update = {"minibatches": 2, "epochs": 2, "max_tokens_per_micro_batch": 60}
    fit(make_module(update=update), callbacks=[listener], max_steps=8)
    steps, numbers = [], []
    for stage in listener.ended:
        if stage.name == "micro_batch":
            numbers.append(stage.micro_batch)
        elif stage.name == "update":
            steps.append(numbers)
            numbers = []
    assert len(steps) == 2
    for numbers in steps:
        assert numbers == list(range(len(numbers)))
        assert len(numbers) >= 4


class AsynchronousClock:
    """A device that finishes its work only when it is waited for; a moment is a number of calls."""

    is_asynchronous = True

    def __init__(self):
        self.marks, self.waits, self.passed = 0, 0, 0

    def mark(self):
        self.marks += 1
        return self.marks

    def seconds(self, start, end):
        assert end <= self.passed
        return end - start

    def wait(self):
        self.waits += 1
        self.passed = self.marks


@pytest.fixture
def clock(monkeypatch):
    clock = AsynchronousClock()
    monkeypatch.setattr(stages, "clock_of", lambda device: clock)
    return clock


def test_micro_batches_do_not_wait_for_a_gpu_and_are_reported_when_the_update_ends(clock):
    listener = Listener()
    events = events_for(listener)
    with events.stage("update"):
        for number in range(3):
            with events.stage("micro_batch", number) as details:
                details["rows"] = number
        assert clock.waits == 0
        assert listener.ended == []
    assert clock.waits == 1
    assert [stage.micro_batch for stage in listener.ended] == [0, 1, 2, None]
    assert [stage.details.get("rows") for stage in listener.ended] == [0, 1, 2, None]
    assert [stage.seconds for stage in listener.ended] == [1, 1, 1, 7]


def test_micro_batches_of_an_update_that_fails_are_not_reported_later(clock):
    listener = Listener()
    events = events_for(listener)

    def update():
        with events.stage("update"):
            with events.stage("micro_batch", 0):
                pass
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        update()
    with events.stage("reward"):
        pass
    assert [stage.name for stage in listener.ended] == ["reward"]


def test_the_running_stage_is_known_until_it_ends_or_fails():
    events = events_for()
    with events.stage("update", progress=lambda: StageProgress(num_done=3, total=8)):
        with events.stage("micro_batch", 0):
            assert events.running.name == "update"
        assert events.running.progress() == StageProgress(num_done=3, total=8)
    assert events.running is None
    with pytest.raises(ZeroDivisionError), events.stage("reward"):
        raise ZeroDivisionError
    assert events.running is None


class Progress(L.Callback):
    """Keeps how far the update is at the start of every micro-batch."""

    def __init__(self):
        self.updates = []

    def on_stage_start(self, trainer, pl_module, name):
        if name == "micro_batch":
            self.updates.append(pl_module.events.running.progress())


def test_an_update_counts_the_rows_that_it_has_been_through():
    seen = Progress()
    fit(make_module(update={"max_tokens_per_micro_batch": 60}), callbacks=[seen])
    counts = [one.num_done for one in seen.updates]
    assert counts == sorted(set(counts))
    assert counts[0] == 0
    assert {one.total for one in seen.updates} == {16}


def test_a_stage_that_runs_out_of_memory_is_named_once():
    events = events_for()
    update, micro_batch = events.stage("update"), events.stage("micro_batch", 0)
    with pytest.raises(OutOfMemory) as caught, update, micro_batch:
        torch.empty(2**48)
    assert str(caught.value).count("out of memory in the stage") == 1
    assert str(caught.value).startswith("out of memory in the stage micro_batch.")


def test_a_callback_may_skip_the_update():
    class Skips(L.Callback):
        def on_rollouts(self, trainer, pl_module, rollouts):
            return rollouts == "bad"

    events = events_for(Skips())
    assert events.reason_to_skip_update("bad")
    assert not events.reason_to_skip_update("good")
    assert not events_for().reason_to_skip_update("bad")
