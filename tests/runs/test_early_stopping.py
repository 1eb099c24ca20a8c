"""`EarlyStopping` looks after validations, and its decision outlives the run that it has ended."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from cli_base import BASE
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.trainer.states import TrainerFn
from run_logs import workplace

from lit_grpo.__main__ import main
from lit_grpo.runs.early_stopping import ResumedEarlyStopping, check_after_validations


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
    check_after_validations([stopping, ResumedEarlyStopping()])
    assert stopping._check_on_train_epoch_end is expected


def resume(
    patience: int, *, fn: TrainerFn = TrainerFn.FITTING, settings: dict | None = None, **state
) -> SimpleNamespace:
    """Load a checkpoint into a run with this patience; return its trainer."""
    stopping = EarlyStopping("val/accuracy", patience=patience, **(settings or {}))
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
    assert message == (
        "EarlyStopping ended this run at step 7: No better for 2. Nothing is left to train. To "
        "train on, give it more patience than 2, or leave it out of trainer.callbacks."
    )


def test_more_patience_lets_the_run_go_on():
    trainer = resume(patience=3)
    assert not trainer.should_stop
    assert trainer.saved["patience"] == 3


REACHED = "Stopping threshold reached: val/accuracy = 0.9800000190734863 > 0.97."
DIVERGED = "Divergence threshold reached: val/accuracy = -0.25 > 0.1."


@pytest.mark.parametrize(
    ("reason", "message", "settings", "remedy"),
    [
        ("STOPPING_THRESHOLD", REACHED, {"stopping_threshold": 0.97}, "raise or remove its stop"),
        ("STOPPING_THRESHOLD", REACHED, {"stopping_threshold": 0.98}, ""),
        ("STOPPING_THRESHOLD", REACHED, {}, ""),
        ("STOPPING_THRESHOLD", "?", {"stopping_threshold": 0.99}, "raise or remove its stopping"),
        ("DIVERGENCE_THRESHOLD", DIVERGED, {"divergence_threshold": 0.0}, "lower or remove its d"),
        ("DIVERGENCE_THRESHOLD", DIVERGED, {"divergence_threshold": -0.5}, ""),
        ("NON_FINITE_METRIC", "It is nan.", {}, "set its check_finite to false"),
        ("NON_FINITE_METRIC", "It is nan.", {"check_finite": False}, ""),
    ],
)
def test_another_reason_ends_a_run_unless_its_own_setting_has_changed(
    reason, message, settings, remedy, caplog
):
    with caplog.at_level(logging.INFO, logger="lit_grpo"):
        trainer = resume(
            patience=9,
            settings={"mode": "max"} | settings,
            stopping_reason=EarlyStoppingReason[reason].value,
            stopping_reason_message=message,
        )
    assert trainer.should_stop == bool(remedy)
    assert [
        f"{message} Nothing is left to train. To train on, {remedy}" in one
        for one in caplog.messages
    ] == [True] * bool(remedy)
    if not remedy:
        assert trainer.saved["stopping_reason_message"] is None


@pytest.mark.parametrize(
    "state",
    [
        {"fn": TrainerFn.VALIDATING},
        {"stopping_reason": EarlyStoppingReason.NOT_STOPPED.value, "wait_count": 1},
    ],
)
def test_a_run_that_was_not_ended_or_is_only_evaluated_goes_on(state):
    assert not resume(patience=2, **state).should_stop


def write_config(threshold: float) -> None:
    stop = {"monitor": "val/accuracy", "mode": "max", "patience": 9}
    callback = {
        "class_path": "EarlyStopping",
        "init_args": stop | {"stopping_threshold": threshold},
    }
    every_step = {"val_check_interval": 1, "check_val_every_n_epoch": None}
    trainer = BASE["trainer"] | {"callbacks": [callback]} | every_step
    Path("mine.yaml").write_text(yaml.safe_dump(BASE | {"trainer": trainer}))


@pytest.mark.slow
def test_more_steps_do_not_help_a_run_at_its_threshold_and_another_threshold_does(tmp_path):
    with workplace(tmp_path):
        words = ["fit", "--config=mine.yaml", "--run_dir=run", "--ckpt_path=auto"]
        write_config(-1.0)
        assert main(words) == 0
        assert main(["fit", "run", "--trainer.max_steps=3"]) == 0
        *_, ended, unchanged, done = Path("run/run.log").read_text().splitlines()
        assert "EarlyStopping ended this run at step 1: Stopping threshold reached" in ended
        assert "To train on, raise or remove its stopping_threshold, or leave it out" in ended
        assert unchanged.endswith("no step was left to take, so that no change was applied")
        assert "ended after optimizer step 1: Stopping threshold reached" in done
        write_config(1.5)
        assert main([*words, "--trainer.max_steps=3"]) == 0
        assert "done after optimizer step 3" in Path("run/run.log").read_text().splitlines()[-1]
