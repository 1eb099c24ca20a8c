"""A callback that watches a metric that nothing logs is told so in one line, if it can, early."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml
from cli_base import BASE
from run_logs import workplace

from lit_grpo.__main__ import main

MINE = """
import os, signal
from lightning.pytorch import Callback
from lit_grpo.training import GRPOModule

class Module(GRPOModule):
    pass

class Logs(Callback):
    def on_validation_epoch_end(self, trainer, module):
        module.log("val/mine", 1.0)

class Preempted(Callback):
    def on_train_batch_end(self, trainer, *args):
        os.kill(os.getpid(), signal.SIGTERM)
"""
EVERY_EPOCH = ("--trainer.check_val_every_n_epoch=1", "--trainer.val_check_interval=1.0")


@pytest.fixture
def fit(tmp_path, capsys, monkeypatch):
    """Return a function that trains two steps, each with a validation, as a user does."""
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (tmp_path / "mine.py").write_text(MINE)

    def run(kind: str, monitor: str, *words: str, others: tuple[str, ...] = ()):
        """Return the exit code, and the warnings and the error about the callback."""
        settings = {"monitor": monitor, "mode": "max"}
        callbacks = [{"class_path": kind, "init_args": settings}, *others]
        trainer = {"check_val_every_n_epoch": None, "val_check_interval": 1, "callbacks": callbacks}
        config = BASE | {"trainer": BASE["trainer"] | trainer}
        Path("my.yaml").write_text(yaml.safe_dump(config))
        exit_code = main(["fit", "--config=my.yaml", "--run_dir=my", *words])
        log = Path("my/run.log").read_text().splitlines()
        lines = [line for line in log if "WARNING" in line] + capsys.readouterr().err.splitlines()
        return exit_code, [line for line in lines if f"{kind} watches {monitor}" in line]

    with workplace(tmp_path):
        yield run


def num_steps() -> int:
    metrics = Path("my/metrics.csv")
    return len(metrics.read_text().splitlines()) - 1 if metrics.exists() else 0


@pytest.mark.parametrize("kind", ["EarlyStopping", "ModelCheckpoint", "Checkpoints"])
def test_a_misspelt_metric_of_the_validation_is_refused_before_the_first_step(kind, fit):
    exit_code, (line,) = fit(kind, "val/acuracy")
    assert (exit_code, num_steps()) == (2, 0)
    assert line.startswith(
        f"error: {kind} watches val/acuracy, which nothing logs. Logged are val/accuracy, "
        "val/mean_length, val/unscored_fraction, and"
    )
    assert line.endswith("Did you mean val/accuracy? Correct its monitor in trainer.callbacks.")


@pytest.mark.parametrize("kind", ["EarlyStopping", "ModelCheckpoint"])
@pytest.mark.parametrize("monitor", ["val/accuracy", "reward/mean"])
def test_the_lowest_accuracy_or_reward_is_not_taken_for_the_best(kind, monitor, fit):
    exit_code, _ = fit(kind, monitor, "--trainer.callbacks.mode=min")
    assert (exit_code, num_steps()) == (2, 0)
    log = Path("my/run.log").read_text()
    assert f"{kind}.mode must be max to watch {monitor}, got min, its default" in log


def test_of_other_metrics_the_lowest_may_be_the_best(fit):
    assert fit("EarlyStopping", "val/mean_length", "--trainer.callbacks.mode=min")[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["EarlyStopping", "ModelCheckpoint"])
def test_where_code_of_the_user_may_log_it_there_is_a_warning_until_it_is_missing(kind, fit):
    exit_code, (warning, line) = fit(kind, "val/acuracy", "--model.class_path=mine.Module")
    assert (exit_code, num_steps()) == (2, 1)
    assert "Did you mean val/accuracy?" in warning
    assert warning.endswith("trainer.callbacks, unless code of yours logs it.")
    assert line.startswith(f"error: {kind} watches val/acuracy, which nothing logs. Logged are val")
    assert line.endswith("Did you mean val/accuracy? Correct its monitor in trainer.callbacks.")
    assert "Traceback" in Path("my/run.log").read_text()


def test_a_metric_that_a_callback_of_the_user_logs_can_be_watched(fit):
    exit_code, (warning,) = fit("EarlyStopping", "val/mine", others=("mine.Logs",))
    assert (exit_code, num_steps()) == (0, 2)
    assert warning.endswith("unless code of yours logs it.")


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("--data.validation_size=0", "Set data.validation, or data.validation_size"),
        ("--trainer.limit_val_batches=0", "Set trainer.limit_val_batches above 0"),
    ],
)
def test_without_a_validation_its_metrics_are_refused(word, fix, fit):
    exit_code, (line,) = fit("EarlyStopping", "val/accuracy", word, *EVERY_EPOCH)
    assert (exit_code, num_steps()) == (2, 0)
    assert line.startswith("error: EarlyStopping watches val/accuracy at each validation, but no ")
    assert fix in line


@pytest.mark.slow
@pytest.mark.parametrize("monitor", ["val/accuracy", "reward/mean"])
def test_without_a_validation_there_is_no_best_checkpoint(monitor, fit):
    exit_code, (warning,) = fit("Checkpoints", monitor, "--data.validation_size=0")
    assert (exit_code, num_steps()) == (0, 2)
    assert "but no validation will run. Set data.validation" in warning
    assert not Path("my/checkpoints/best.ckpt").exists()


def test_a_metric_of_the_steps_can_be_watched(fit):
    assert fit("Checkpoints", "reward/mean") == (0, [])
    assert Path("my/checkpoints/best.ckpt").exists()


@pytest.mark.slow
def test_a_misspelt_metric_of_the_steps_is_named_after_the_first(fit):
    words = (*EVERY_EPOCH, "--trainer.max_steps=5")
    exit_code, (warning, error) = fit("EarlyStopping", "reward/maen", *words)
    assert (exit_code, num_steps()) == (2, 4)  # where Lightning looks for it
    assert "Did you mean reward/mean?" in warning
    assert "Did you mean reward/mean?" in error
    assert warning.endswith("trainer.callbacks, unless a later step logs it.")


def test_early_stopping_lets_a_run_end_before_its_first_validation(fit):
    exit_code, lines = fit("EarlyStopping", "val/accuracy", *EVERY_EPOCH)
    assert (exit_code, lines, num_steps()) == (0, [], 2)


def test_early_stopping_lets_a_preempted_run_write_its_checkpoint(fit):
    words = ("val/accuracy", *EVERY_EPOCH)
    exit_code, lines = fit("EarlyStopping", *words, others=("mine.Preempted",))
    assert (exit_code, lines) == (143, [])
    assert Path("my/checkpoints/last.ckpt").exists()


@pytest.mark.slow
def test_early_stopping_looks_after_the_validation_of_an_epoch(fit):
    reached = "--trainer.callbacks.stopping_threshold=-1.0"
    words = (*EVERY_EPOCH, "--trainer.max_steps=8", reached)
    assert fit("EarlyStopping", "val/accuracy", *words) == (0, [])
    assert num_steps() == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--data.validation_size=0",),
            "EarlyStopping watches reward/mean after each validation, but no validation will run, "
            "so it never ends the run. Set data.validation, or data.validation_size to hold out "
            "rows.",
        ),
        (
            ("--trainer.limit_val_batches=0", "--trainer.max_steps=5"),
            "Set trainer.limit_val_batches above 0, or its check_on_train_epoch_end to true.",
        ),
        (
            (*EVERY_EPOCH, "--data.validation_size=0", "--trainer.max_steps=4"),
            "at the end of each epoch, but the run of 4 steps ends no later than its first epoch, "
            "of 4, so it never ends the run. To let it look after each validation, set its "
            "check_on_train_epoch_end to false, trainer.check_val_every_n_epoch to null, "
            "trainer.val_check_interval to a number of steps, and data.validation, or",
        ),
        (
            (*EVERY_EPOCH, "--trainer.max_epochs=1"),
            "trainer.val_check_interval to a number of steps.",
        ),
    ],
)
def test_early_stopping_that_is_never_asked_is_named_at_the_start(words, said, fit):
    exit_code, (warning,) = fit("EarlyStopping", "reward/mean", *words)
    assert exit_code == 0
    assert said in warning


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [(), (*EVERY_EPOCH, "--data.validation_size=0", "--trainer.max_steps=5")],
    ids=["after validations", "after the first epoch"],
)
def test_early_stopping_that_is_asked_ends_the_run(words, fit):
    reached = "--trainer.callbacks.stopping_threshold=-1.0"
    assert fit("EarlyStopping", "reward/mean", reached, *words) == (0, [])
    assert num_steps() == (4 if words else 1)
