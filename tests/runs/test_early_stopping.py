"""`EarlyStopping` looks after validations, and its decision outlives the run that it has ended."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.trainer.states import TrainerFn

from lit_grpo.runs.early_stopping import ResumedEarlyStopping, look_after_validations


@pytest.mark.parametrize(
    ("monitor", "given", "expected"),
    [
        ("val/accuracy", None, False),
        ("val/accuracy", True, True),
        ("reward/mean", None, None),
    ],
)
def test_a_metric_of_the_validation_is_looked_at_after_it_unless_the_user_says_when(
    monitor, given, expected
):
    stopping = EarlyStopping(monitor, check_on_train_epoch_end=given)
    look_after_validations([stopping, ResumedEarlyStopping()])
    assert stopping._check_on_train_epoch_end is expected


def resume(patience: int, *, fn: TrainerFn = TrainerFn.FITTING, **state) -> SimpleNamespace:
    """Load a checkpoint into a run with this patience; return its trainer."""
    stopping = EarlyStopping("val/accuracy", patience=patience)
    saved = stopping.state_dict() | {
        "patience": 2,
        "wait_count": 2,
        "stopping_reason": EarlyStoppingReason.PATIENCE_EXHAUSTED.value,
        "stopping_reason_message": "No better for 2. Signaling Trainer to stop.",
    } | state  # fmt: skip
    trainer = SimpleNamespace(
        state=SimpleNamespace(fn=fn), callbacks=[stopping], should_stop=False, saved=saved
    )
    checkpoint = {"callbacks": {stopping.state_key: saved}, "global_step": 7}
    ResumedEarlyStopping().on_load_checkpoint(trainer, None, checkpoint)
    return trainer


def test_a_run_whose_patience_is_exhausted_stays_ended_and_says_why(caplog):
    with caplog.at_level(logging.INFO, logger="lit_grpo"):
        assert resume(patience=2).should_stop
    (message,) = caplog.messages
    assert message.startswith("EarlyStopping ended this run at step 7: No better for 2. Nothing")


def test_more_patience_lets_the_run_go_on():
    trainer = resume(patience=3)
    assert not trainer.should_stop
    assert trainer.saved["patience"] == 3


def test_another_reason_ends_the_run_whatever_its_patience():
    reason = EarlyStoppingReason.STOPPING_THRESHOLD.value
    assert resume(patience=9, stopping_reason=reason).should_stop


@pytest.mark.parametrize(
    "state",
    [
        {"fn": TrainerFn.VALIDATING},
        {"stopping_reason": EarlyStoppingReason.NOT_STOPPED.value, "wait_count": 1},
    ],
)
def test_a_run_that_was_not_ended_or_is_only_evaluated_goes_on(state):
    assert not resume(patience=2, **state).should_stop
