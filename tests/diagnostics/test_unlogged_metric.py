"""The words for a metric that nothing logs; the tests of ``watched_metrics`` have whole runs."""

from types import SimpleNamespace

import pytest

from lit_grpo.diagnostics.unlogged_metric import as_unknown_monitor, describe_unknown
from lit_grpo.types import UserError

OF_STEPS = "the metrics of a step, the columns of metrics.csv"
TRAINER = SimpleNamespace(callback_metrics={"val/accuracy": 0.5, "reward/mean": 0.1})


def test_an_unknown_monitor_is_named_with_those_of_a_validation_and_the_likeliest():
    logged = ["val/mean_length", "reward/mean", "val/accuracy"]
    assert describe_unknown("EarlyStopping", "val/acuracy", logged) == (
        "EarlyStopping watches val/acuracy, which nothing logs. Logged are val/accuracy, "
        f"val/mean_length, and {OF_STEPS}. Did you mean val/accuracy? Correct its monitor in "
        "trainer.callbacks"
    )


def test_of_the_metrics_of_a_quantity_its_mean_is_proposed():
    logged = ["reward/std", "reward/mean", "reward/correct/mean"]
    assert "Did you mean reward/mean?" in describe_unknown("ModelCheckpoint", "reward", logged)


def test_without_a_validation_only_the_metrics_of_steps_are_named():
    assert describe_unknown("Checkpoints", "loss", []) == (
        f"Checkpoints watches loss, which nothing logs. Logged are {OF_STEPS}. Correct its "
        "monitor in trainer.callbacks"
    )


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (
            "Early stopping conditioned on metric `val/acuracy` which is not available. Pass in or "
            "modify your `EarlyStopping` callback to use any of the following: `val/accuracy`",
            "EarlyStopping",
        ),
        (
            "`ModelCheckpoint(monitor='val/acuracy')` could not find the monitored key in the "
            "returned metrics: ['val/accuracy'].",
            "ModelCheckpoint",
        ),
    ],
)
def test_an_error_of_lightning_is_said_in_words_for_the_user(message, kind):
    error = as_unknown_monitor(RuntimeError(message), TRAINER)
    assert isinstance(error, UserError)
    assert str(error) == f"{describe_unknown(kind, 'val/acuracy', TRAINER.callback_metrics)}."


def test_any_other_error_is_not_about_a_monitor():
    assert as_unknown_monitor(RuntimeError("CUDA error: device lost"), TRAINER) is None
