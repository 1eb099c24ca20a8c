"""``metrics.csv``: its rows and columns, also after kills and resumes."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pandas as pd
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from toy_rollouts import fit, outputs, rollouts, train_batch

from lit_grpo.runs.files.metrics import MetricsFile

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


def test_a_step_that_was_left_undone_has_no_row_and_takes_those_of_later_steps_away(tmp_path):
    file = MetricsFile(tmp_path)
    for step in range(3):
        file.log_metrics({"reward/mean": 0.5, "epoch": 0}, step=step)
    resumed = MetricsFile(tmp_path)
    resumed.log_metrics({"val/accuracy": 0.25}, step=1)
    resumed.log_metrics({"reward/mean": math.nan, "epoch": 0}, step=1)
    assert column(file.path, "step") == ["0", "1"]
    assert column(file.path, "val/accuracy") == ["", "0.25"]
    again = MetricsFile(tmp_path)
    again.log_metrics({"reward/mean": math.nan, "epoch": 0}, step=0)
    assert rows_of(file.path) == []


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
