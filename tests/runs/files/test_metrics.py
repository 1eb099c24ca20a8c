"""``metrics.csv``: its rows and columns, also after kills and resumes."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import lightning as L
import pandas as pd
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from toy_rollouts import DEFAULTS, ToyModule, fit, loader, outputs, rollouts, train_batch

from lit_grpo.runs.files.metrics import MetricsFile
from lit_grpo.stopping import stop_run
from lit_grpo.types import StopReason

STEP = outputs(rollouts([[0.0, 1.0]]), train_batch([-1.0, 1.0]))


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def column(path: Path, name: str) -> list[str]:
    return [row[name] for row in rows_of(path)]


def test_metrics_of_one_step_share_a_row_and_are_readable_at_once(tmp_path):
    file = MetricsFile(tmp_path)
    file.log_metrics({"reward/mean": 0.5, "epoch": 0}, step=0)
    assert column(file.path, "reward/mean") == ["0.5"]
    file.log_metrics({"val/accuracy": 0.25}, step=0)
    file.log_metrics({"reward/mean": 0.1}, step=1)
    assert rows_of(file.path)[0]["val/accuracy"] == "0.25"
    assert rows_of(file.path)[1] | {"seconds": ""} == {
        "step": "1",
        "seconds": "",
        "resumes": "0",
        "reward/mean": "0.1",
        "epoch": "",
        "val/accuracy": "",
    }


def test_rewriting_the_last_row_with_longer_or_shorter_values_leaves_no_remains(tmp_path):
    file = MetricsFile(tmp_path)
    file.log_metrics({"a": 1.0, "b": 2.0}, step=0)
    file.log_metrics({"a": 1.23456789012345, "b": -2.5e-10}, step=1)
    file.log_metrics({"a": 1.0, "b": 2.0}, step=1)
    assert column(file.path, "a") == ["1.0", "1.0"]
    assert column(file.path, "b") == ["2.0", "2.0"]


class Leave(Callback):
    """Leave a step undone, as an outage does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer, *_):
        if trainer.fit_loop.total_batch_idx == self.step:
            stop_run(trainer, StopReason(exit_code=4, message="left", is_step_unfinished=True))


class Rows(DummyLogger):
    """A logger of the user's, which keeps what it is given."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, set(metrics)))


def train(run_dir: Path, *callbacks: Callback, loggers=(), make_outputs=None, **options):
    """Train the toy module as a run does, with learning rates, which come as a step begins."""
    file = MetricsFile(run_dir)
    given = [LearningRateMonitor(logging_interval="step"), file, *callbacks]
    make_outputs = make_outputs or (lambda step: STEP)
    return fit(make_outputs, given, logger=[file, *loggers], **options)


def test_a_step_that_is_left_undone_has_no_row_with_any_logger(tmp_path):
    others = Rows()
    train(tmp_path, Leave(step=2), loggers=[others], steps=4)
    assert column(tmp_path / "metrics.csv", "step") == ["0", "1"]
    assert all(column(tmp_path / "metrics.csv", "lr-SGD"))
    assert [step for step, names in others.rows if "policy/loss" in names] == [0, 1]


def test_a_step_that_is_left_undone_takes_away_the_rows_of_an_earlier_process(tmp_path):
    path = tmp_path / "metrics.csv"
    checkpoint = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    train(tmp_path, checkpoint, steps=4, enable_checkpointing=True)
    assert column(path, "step") == ["0", "1", "2", "3"]
    train(tmp_path, Leave(step=2), ckpt_path=tmp_path / "step=2.ckpt", steps=4)
    assert column(path, "step") == ["0", "1"]
    train(tmp_path, ckpt_path=tmp_path / "step=2.ckpt", steps=4)
    assert column(path, "step") == ["0", "1", "2", "3"]
    assert all(column(path, "policy/loss"))


def test_a_step_that_fails_has_no_row(tmp_path):
    def fail_later(step):
        if step == 2:
            raise ZeroDivisionError
        return STEP

    with pytest.raises(ZeroDivisionError):
        train(tmp_path, make_outputs=fail_later)
    assert column(tmp_path / "metrics.csv", "step") == ["0", "1"]


def test_a_step_whose_gradient_is_still_accumulated_has_no_row(tmp_path, monkeypatch):
    def training_step(self, batch, batch_idx):
        if self.trainer.fit_loop.total_batch_idx == 5:
            raise ZeroDivisionError
        loss = self.linear(torch.stack(batch)).square().sum()
        self.log("sft/loss", loss)
        return loss

    monkeypatch.setattr(ToyModule, "training_step", training_step)
    file, rates = MetricsFile(tmp_path), LearningRateMonitor(logging_interval="step")
    module, num_batches = ToyModule(lambda step: STEP), 8
    module.automatic_optimization = True
    trainer = L.Trainer(
        **DEFAULTS,
        logger=file,
        callbacks=[rates, file],
        accumulate_grad_batches=2,
        max_steps=4,
        enable_model_summary=False,
    )
    with pytest.raises(ZeroDivisionError):
        trainer.fit(module, loader(num_batches))
    assert column(file.path, "step") == ["0", "1"]
    assert all(column(file.path, "lr-SGD"))


def test_a_finished_step_has_a_row_even_if_it_measured_nothing(tmp_path, monkeypatch):
    path = tmp_path / "metrics.csv"
    file = MetricsFile(tmp_path)
    monkeypatch.setattr(ToyModule, "log_dict", lambda self, values: None)
    fit(lambda step: STEP, [file], logger=file, steps=2)
    assert column(path, "step") == ["0", "1"]
    nothing = dict.fromkeys(["policy/loss", "reward/mean"], math.nan)
    monkeypatch.setattr(
        ToyModule, "log_dict", lambda self, _: L.LightningModule.log_dict(self, nothing)
    )
    (tmp_path / "nan").mkdir()
    file = MetricsFile(tmp_path / "nan")
    fit(lambda step: STEP, [file], logger=file, steps=2)
    assert column(file.path, "reward/mean") == ["nan", "nan"]


def test_a_run_that_logs_every_second_step_has_no_other_rows(tmp_path):
    train(tmp_path, steps=4, log_every_n_steps=2)
    assert column(tmp_path / "metrics.csv", "step") == ["1", "3"]


def test_what_is_logged_at_the_end_of_an_epoch_is_in_the_row_of_its_last_step(tmp_path):
    class AtTheEnd(Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            pl_module.log("own", 1.0, on_step=False, on_epoch=True)

    train(tmp_path, AtTheEnd(), steps=4, num_batches=2)
    path = tmp_path / "metrics.csv"
    assert column(path, "step") == ["0", "1", "2", "3"]
    assert column(path, "own") == ["", "1.0", "", "1.0"]


def test_new_metrics_add_columns_and_keep_earlier_rows(tmp_path):
    file = MetricsFile(tmp_path)
    file.log_metrics({"a": 1.0}, step=0)
    file.log_metrics({"b": 2.0}, step=1)
    assert column(file.path, "a") == ["1.0", ""]
    assert column(file.path, "b") == ["", "2.0"]
    assert list(tmp_path.iterdir()) == [file.path]


def test_pandas_reads_the_file_with_a_missing_value_as_nan(tmp_path):
    file = MetricsFile(tmp_path)
    file.log_metrics({"a": float("nan"), "b": torch.tensor(0.5)}, step=3)
    frame = pd.read_csv(file.path)
    assert frame["step"].tolist() == [3]
    assert frame["a"].isna().tolist() == [True]
    assert frame["b"].tolist() == [0.5]


def test_a_resumed_run_rewrites_its_steps_and_keeps_earlier_ones(tmp_path):
    first = MetricsFile(tmp_path)
    for step in range(4):
        first.log_metrics({"a": float(step)}, step=step)
    resumed = MetricsFile(tmp_path)
    resumed.log_metrics({"a": 20.0, "b": 1.0}, step=2)
    assert column(resumed.path, "step") == ["0", "1", "2"]
    resumed.log_metrics({"a": 30.0}, step=3)
    assert column(resumed.path, "a") == ["0.0", "1.0", "20.0", "30.0"]


def test_a_file_of_an_earlier_version_gets_the_columns_that_it_lacks(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,seconds,a\n0,1.5,2.0\n")
    MetricsFile(tmp_path).log_metrics({"b": 3.0}, step=1)
    rows = pd.read_csv(tmp_path / "metrics.csv")
    assert list(rows.columns) == ["step", "seconds", "a", "resumes", "b"]
    assert rows["resumes"].tolist()[1:] == [1]


def test_seconds_continue_from_the_last_row_that_is_kept(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("step,seconds,a\n0,10.0,1\n1,20.0,1\n2,900.0,1\n")
    MetricsFile(tmp_path).log_metrics({"a": 2.0}, step=2)
    assert 20 <= float(column(path, "seconds")[2]) < 80


def test_an_evaluation_before_the_first_step_deletes_nothing(tmp_path):
    first = MetricsFile(tmp_path)
    for step in range(3):
        first.log_metrics({"a": float(step)}, step=step)
    resumed = MetricsFile(tmp_path)
    resumed.log_metrics({"val/accuracy": 0.5, "epoch": 0.0}, step=1)
    assert column(resumed.path, "a") == ["0.0", "1.0", "2.0"]
    resumed.log_metrics({"a": 9.0}, step=2)
    assert column(resumed.path, "a") == ["0.0", "1.0", "9.0"]
    assert column(resumed.path, "val/accuracy") == ["", "0.5", ""]


def test_an_evaluation_before_training_shares_the_row_of_the_first_step(tmp_path):
    file = MetricsFile(tmp_path)
    file.log_metrics({"val/accuracy": 0.5}, step=0)
    file.log_metrics({"a": 1.0}, step=0)
    assert column(file.path, "val/accuracy") == ["0.5"]
    assert column(file.path, "a") == ["1.0"]


def test_the_seconds_of_a_row_are_those_of_its_step_and_of_no_validation(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("lit_grpo.runs.files.metrics.time.monotonic", lambda: now[0])
    file = MetricsFile(tmp_path)
    logged = [
        (104.6, {"val/accuracy": 0.5}, 0),
        (121.9, {"a": 1.0, "epoch": 0.0}, 0),
        (125.0, {"timing/save_s": 1.0}, 0),
        (143.9, {"a": 1.0}, 1),
        (150.0, {"val/accuracy": 0.6, "epoch": 0.0}, 1),
    ]
    for now[0], values, step in logged:
        file.log_metrics(values, step=step)
    assert column(file.path, "seconds") == ["21.9", "43.9"]
    assert column(file.path, "val/accuracy") == ["0.5", "0.6"]


def test_a_line_cut_off_by_a_kill_is_dropped(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("step,seconds,a\n0,1.0,0.5\n1,2.0,0.")
    MetricsFile(tmp_path).log_metrics({"a": 3.0}, step=2)
    assert column(path, "step") == ["0", "2"]
    assert column(path, "a") == ["0.5", "3.0"]


def test_lightning_writes_one_row_per_step_also_after_a_resumption(tmp_path):
    def checkpoint():
        return ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)

    path = tmp_path / "metrics.csv"
    for resume_from in (None, tmp_path / "step=2.ckpt"):
        fit(
            lambda step: STEP,
            [checkpoint()],
            steps=5,
            logger=MetricsFile(tmp_path),
            validate_every=2,
            enable_checkpointing=True,
            ckpt_path=resume_from,
        )
        assert column(path, "step") == ["0", "1", "2", "3", "4"]
        assert column(path, "val/accuracy") == ["", "0.5", "", "0.5", ""]
        assert all(column(path, "policy/loss"))


def test_checkpoints_without_a_directory_go_into_the_run_directory(tmp_path):
    checkpoint = ModelCheckpoint(every_n_train_steps=1)
    logger = MetricsFile(tmp_path)
    fit(lambda step: STEP, [checkpoint], steps=1, logger=logger, enable_checkpointing=True)
    assert Path(checkpoint.dirpath) == tmp_path / "checkpoints"


def test_a_run_that_starts_again_keeps_the_accuracy_before_training(tmp_path):
    killed = MetricsFile(tmp_path)  # before its first checkpoint
    killed.log_metrics({"val/accuracy": 0.25}, step=0)
    killed.log_metrics({"reward/mean": 0.5}, step=0)
    killed.log_metrics({"reward/mean": 0.6}, step=1)
    again = MetricsFile(tmp_path)
    again.log_metrics({"val/accuracy": 0.75}, step=0)
    again.log_metrics({"reward/mean": 0.9}, step=0)
    (row,) = rows_of(again.path)
    assert (row["val/accuracy"], row["reward/mean"], row["resumes"]) == ("0.75", "0.9", "1")


def test_a_resumed_run_keeps_no_accuracy_of_a_step_that_it_repeats(tmp_path):
    killed = MetricsFile(tmp_path)
    killed.log_metrics({"reward/mean": 0.5}, step=0)
    killed.log_metrics({"reward/mean": 0.6, "val/accuracy": 0.1}, step=1)
    resumed = MetricsFile(tmp_path)
    resumed.log_metrics({"reward/mean": 0.7}, step=1)
    first, second = rows_of(resumed.path)
    assert first["reward/mean"] == "0.5"
    assert (second["reward/mean"], second["val/accuracy"]) == ("0.7", "")
