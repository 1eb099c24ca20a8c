"""A run that is stopped in its last step ends, once it is resumed, as one that was not stopped."""

from __future__ import annotations

import signal
from functools import partial

import pandas as pd
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from python_runs import StopAfter, train
from small_runs import weights

from lit_grpo.runs.checkpoints.files import read_state
from lit_grpo.runs.files.events import read_events
from lit_grpo.stopping import stop_run
from lit_grpo.types import StopReason

DATA = {"train_size": 8, "validation_size": 4}
"""Four steps an epoch."""
EVERY_TWO = {"val_check_interval": 2, "check_val_every_n_epoch": None}
slow = partial(pytest.param, marks=pytest.mark.slow)
COMPARED = ["step", "epoch", "policy/loss", "val/accuracy"]


def run(directory, *callbacks, **settings):
    changed = {"data": DATA}
    return train(directory, *callbacks, changed=changed, num_sanity_val_steps=0, **settings)[1]


def rows(directory):
    return pd.read_csv(directory / "metrics.csv").reindex(columns=COMPARED)


def loops(directory):
    return read_state(directory / "checkpoints/last.ckpt")["loops"]["fit_loop"]


@pytest.mark.parametrize(
    ("num_steps", "limits", "later"),
    [
        (2, EVERY_TWO | {"max_steps": 2}, {"max_steps": 6}),
        slow(4, EVERY_TWO | {"max_steps": 4}, {"max_steps": 6}),
        slow(4, {"max_steps": 4}, {"max_steps": 8}),
        (4, {"max_steps": -1, "max_epochs": 1}, {"max_epochs": 2}),
        slow(8, {"max_steps": -1, "max_epochs": 2}, {"max_epochs": 3}),
        slow(3, {"max_steps": 3}, {"max_steps": 5}),  # where no validation is due
    ],
    ids=["in an epoch", "at its end", "of an epoch", "one epoch", "two epochs", "none is due"],
)
def test_the_validation_that_a_stop_in_the_last_step_prevented_is_made(
    tmp_path, num_steps, limits, later
):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(whole, **limits)
    run(cut, StopAfter(num_steps), **limits)
    assert rows(cut)["val/accuracy"].isna().iloc[-1]
    run(cut, ckpt_path="last", **limits)
    pd.testing.assert_frame_equal(rows(cut), rows(whole))
    assert read_events(cut)[-1].kind == "done"
    assert (cut / "final/model.safetensors").exists()
    modules = [run(one, ckpt_path="last", **limits | later) for one in (whole, cut)]
    pd.testing.assert_frame_equal(rows(cut), rows(whole))
    assert loops(cut) == loops(whole)
    torch.testing.assert_close(*map(weights, modules), rtol=0, atol=0)


class StopIn(Callback):
    """Stop in a hook, by a signal or as a callback does."""

    def __init__(self, hook, how):
        self.how = how
        setattr(self, hook, self.stop)

    def stop(self, trainer, *args):
        if self.how == "signal":
            signal.raise_signal(signal.SIGINT)
        else:
            stop_run(trainer, StopReason(exit_code=20, message="enough"))


@pytest.mark.slow
@pytest.mark.parametrize("hook", ["on_validation_start", "on_validation_batch_start"])
@pytest.mark.parametrize("how", ["signal", "stop"])
@pytest.mark.parametrize("is_left_before", [True, False])
def test_the_last_validation_can_be_stopped_again_and_again(tmp_path, hook, how, is_left_before):
    whole, cut, limits = tmp_path / "whole", tmp_path / "cut", EVERY_TWO | {"max_steps": 2}
    run(whole, **limits)
    earlier = None
    if is_left_before:
        run(cut, StopAfter(2), **limits)
        earlier = "last"
    run(cut, StopIn(hook, how), ckpt_path=earlier, **limits)
    if how == "stop":  # a signal may let a short validation finish
        assert rows(cut)["val/accuracy"].isna().all()
    run(cut, ckpt_path="last", **limits)
    pd.testing.assert_frame_equal(rows(cut), rows(whole))


def test_a_stop_after_a_validation_whose_batches_are_all_made_keeps_it(tmp_path):
    """A callback that ends every part of a run after a validation does not hold it up."""
    whole, cut, limits = tmp_path / "whole", tmp_path / "cut", EVERY_TWO | {"max_steps": 4}
    run(whole, **limits)
    for earlier in (None, "last"):
        run(cut, StopIn("on_validation_epoch_end", "stop"), ckpt_path=earlier, **limits)
    pd.testing.assert_frame_equal(rows(cut), rows(whole))


class NoMoreValidations(Callback):
    def on_train_start(self, trainer, pl_module):
        trainer.limit_val_batches = 0


def test_no_step_is_taken_in_place_of_a_validation_that_is_turned_off(tmp_path):
    limits = EVERY_TWO | {"max_steps": 2}
    run(tmp_path, StopAfter(2), **limits)
    module = run(tmp_path, NoMoreValidations(), ckpt_path="last", **limits)
    assert module.rollout_step == 2
