"""Lightning's counters are saved so that a resumed run repeats and leaves out nothing."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from toy_rollouts import fit, outputs, rollouts

from lit_grpo.callbacks import Checkpoints
from lit_grpo.runs.checkpoints.files import read_state
from lit_grpo.runs.checkpoints.loop_counters import FIRST_BATCH, undo_end, validates_next
from lit_grpo.runs.files.metrics import MetricsFile
from lit_grpo.stopping import stop_run
from lit_grpo.types import StopReason

STEP = outputs(rollouts([[0.0, 1.0]]))


class StopAt(Callback):
    def __init__(self, step, reason=None):
        self.step = step
        self.reason = reason

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.step:
            trainer.should_stop = True
            if self.reason:
                stop_run(trainer, self.reason)


def assert_same_rows(directory, compared=("step", "policy/loss", "val/accuracy")):
    rows = [pd.read_csv(directory / name / "metrics.csv")[[*compared]] for name in ("cut", "whole")]
    pd.testing.assert_frame_equal(*rows)


def fit_validated(directory, *callbacks, saving=None, **options):
    torch.manual_seed(0)
    checkpoints = Checkpoints(dirpath=str(directory), **(saving or {}))
    options |= {"validate_every": 2, "logger": MetricsFile(directory)}
    return fit(lambda step: STEP, [*callbacks, checkpoints], **options)


# Epochs have three steps, and every second step is followed by a validation: stops come in the
# middle of an epoch, at its end and at that of the run, with and without a validation.
@pytest.mark.parametrize(
    "stop_at", [1, 3, 6, 9, *(pytest.param(step, marks=pytest.mark.slow) for step in (2, 4, 8))]
)
@pytest.mark.parametrize("limits", [{"steps": 8}, {"steps": -1, "max_epochs": 3}])
@pytest.mark.parametrize(
    ("reason", "compared"),
    [
        (None, ["step", "epoch", "policy/loss"]),  # Lightning validates at such a stop
        (StopReason(exit_code=143, message="left"), ["step", "policy/loss", "val/accuracy"]),
    ],
    ids=["a stop of Lightning", "a stop with a reason"],
)
def test_a_resumed_run_continues_exactly_where_it_was_stopped(
    tmp_path, stop_at, limits, reason, compared
):
    run = partial(fit_validated, num_batches=3, **limits)
    whole = run(tmp_path / "whole")
    run(tmp_path / "cut", StopAt(stop_at, reason))
    resumed = run(tmp_path / "cut", ckpt_path=tmp_path / "cut" / "last.ckpt")
    assert torch.equal(resumed.model.linear.weight, whole.model.linear.weight)
    assert resumed.global_step == whole.global_step
    assert_same_rows(tmp_path, compared)


class StopAtStart(Callback):
    def on_train_start(self, trainer, *args):
        stop_run(trainer, StopReason(exit_code=20, message="not now"))


@pytest.mark.parametrize("stop_at", [1, 2, 3, 6, 8])
def test_a_resumed_run_that_is_stopped_before_its_first_step_stays_where_it_was(tmp_path, stop_at):
    run = partial(fit_validated, num_batches=3, steps=8)
    whole = run(tmp_path / "whole")
    run(tmp_path / "cut", StopAt(stop_at, StopReason(exit_code=143, message="left")))
    last = tmp_path / "cut" / "last.ckpt"
    loops = read_state(last)["loops"]
    run(tmp_path / "cut", StopAtStart(), ckpt_path=last)
    assert read_state(last)["loops"] == loops
    resumed = run(tmp_path / "cut", ckpt_path=last)
    assert torch.equal(resumed.model.linear.weight, whole.model.linear.weight)
    assert_same_rows(tmp_path)


def test_a_validation_that_was_left_once_is_not_repeated_by_later_resumes(tmp_path):
    saving = {"every_n_steps": 1, "keep_last": 9}
    run = partial(fit_validated, num_batches=8, steps=8, saving=saving)
    run(tmp_path / "whole")
    run(tmp_path / "cut", StopAt(2, StopReason(exit_code=143, message="left")))
    run(tmp_path / "cut", ckpt_path=tmp_path / "cut" / "last.ckpt")
    run(tmp_path / "cut", ckpt_path=tmp_path / "cut" / "step_000004.ckpt")  # killed after it
    assert_same_rows(tmp_path)


def test_a_finished_run_can_be_made_longer(tmp_path):
    torch.manual_seed(0)
    whole = fit(lambda step: STEP, [], steps=5, num_batches=3)
    torch.manual_seed(0)
    fit(lambda step: STEP, [Checkpoints(dirpath=str(tmp_path))], steps=2, num_batches=3)
    last = tmp_path / "last.ckpt"
    longer = fit(lambda step: STEP, [], steps=5, num_batches=3, ckpt_path=last)
    assert torch.equal(longer.model.linear.weight, whole.model.linear.weight)


def counters(number: int) -> dict[str, dict[str, int]]:
    return {span: dict.fromkeys(FIRST_BATCH, number) for span in ("total", "current")}


def loops() -> dict:
    """The counters at the end of a training run of three batches."""
    return {
        "epoch_progress": counters(1),
        "epoch_loop.batch_progress": counters(3) | {"is_last_batch": True},
        "epoch_loop.val_loop.batch_progress": counters(2) | {"is_last_batch": True},
        "epoch_loop.state_dict": {"_batches_that_stepped": 3},
    }


DONE = {"ready": 3, "started": 3, "processed": 3, "completed": 2}
"""A batch at ``on_train_batch_end``."""


def test_an_end_is_set_back_to_the_end_of_its_last_batch():
    found = loops()
    undo_end(found, SimpleNamespace(), has_left_validation=False)
    progress = found["epoch_loop.batch_progress"]
    assert progress == {"total": DONE, "current": DONE, "is_last_batch": True}
    epoch = {"ready": 1, "started": 1, "processed": 0, "completed": 0}
    assert found["epoch_progress"] == {"total": epoch, "current": epoch}
    assert found["epoch_loop.state_dict"]["_batches_that_stepped"] == 2
    assert found["epoch_loop.val_loop.batch_progress"]["total"] == dict.fromkeys(FIRST_BATCH, 2)


def test_a_validation_that_was_left_stands_in_its_first_batch():
    found = loops()
    undo_end(found, SimpleNamespace(), has_left_validation=True)
    progress = found["epoch_loop.val_loop.batch_progress"]
    assert progress == {"total": FIRST_BATCH, "current": FIRST_BATCH, "is_last_batch": False}
    assert found["epoch_loop.state_dict"]["_batches_that_stepped"] == 1


def test_a_step_that_was_left_undone_is_not_counted():
    reason = StopReason(exit_code=143, message="left", is_step_unfinished=True)
    found = loops()
    undo_end(found, SimpleNamespace(stop_reason=reason), has_left_validation=False)
    before = {name: number - 1 for name, number in DONE.items()}
    progress = found["epoch_loop.batch_progress"]
    assert progress == {"total": before, "current": before, "is_last_batch": False}
    assert found["epoch_loop.state_dict"]["_batches_that_stepped"] == 1


@pytest.mark.parametrize(
    ("is_due", "is_enabled", "loader", "is_skipped", "expected"),
    [
        (True, True, object(), False, True),
        (False, True, object(), False, False),
        (True, False, object(), False, False),
        (True, True, object(), True, False),  # it has no prompts
        (True, True, None, True, True),  # its loader has not been read
    ],
)
def test_a_validation_comes_next_if_it_is_due_and_has_prompts(
    is_due, is_enabled, loader, is_skipped, expected
):
    val_loop = SimpleNamespace(_combined_loader=loader, skip=is_skipped)
    epoch_loop = SimpleNamespace(val_loop=val_loop, _should_check_val_fx=lambda fetcher: is_due)
    fit_loop = SimpleNamespace(epoch_loop=epoch_loop, _data_fetcher=None)
    trainer = SimpleNamespace(fit_loop=fit_loop, enable_validation=is_enabled)
    assert validates_next(trainer) == expected
