"""Settings of Lightning's trainer that a run refuses, each with what to set."""

from __future__ import annotations

import math
import re
from datetime import timedelta

import pytest
from lightning.pytorch.accelerators import MPSAccelerator
from lightning.pytorch.trainer.connectors import accelerator_connector
from small_runs import make_module

from lit_grpo import AdditionData, Trainer
from lit_grpo.runs.trainer_settings import (
    check_counts,
    check_intervals,
    check_max_time,
    check_root,
    refuse_float16,
    refuse_missing_gpu,
)
from lit_grpo.types import UserError


@pytest.mark.parametrize("precision", [16, "16", "16-mixed", "16-true"])
def test_float16_is_refused(precision):
    with pytest.raises(UserError, match=f"must be 32-true or bf16-mixed, got {precision}"):
        refuse_float16(precision)


@pytest.mark.parametrize("precision", [None, 32, "32-true", "bf16-mixed", "bf16-true"])
def test_other_precisions_are_for_lightning_to_check(precision):
    refuse_float16(precision)


def test_another_root_than_the_directory_of_the_run_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_root(None, "run")
    check_root(tmp_path / "run", "run")
    with pytest.raises(UserError, match=r"^trainer\.default_root_dir must be null, got other \("):
        check_root("other", "run")


@pytest.mark.parametrize("limit", [None, "00:01:00:00", {"hours": 1}, timedelta(hours=1)])
def test_a_time_limit_that_lightning_reads_is_taken(limit):
    check_max_time(limit)


@pytest.mark.parametrize("limit", ["1h", "1:00:00", 3600, "00:1:00:00"])
def test_a_time_limit_in_another_form_is_refused_with_an_example(limit):
    with pytest.raises(UserError, match=f"got {limit}.* One hour is '00:01:00:00'"):
        check_max_time(limit)


@pytest.mark.parametrize("interval", [None, 1, 100, 0.5, 1.0, "00:00:10:00"])
def test_an_interval_within_an_epoch_is_taken(interval):
    check_intervals(interval, 1)


@pytest.mark.parametrize("interval", [0, -1, 0.0, 1.5, math.nan])
def test_an_interval_that_is_no_part_of_an_epoch_is_refused(interval):
    with pytest.raises(UserError, match=rf"got {interval} \(a whole number counts the steps in"):
        check_intervals(interval, 1)


@pytest.mark.parametrize(("interval", "is_taken"), [(1, True), (9, True), (0, False), (0.5, False)])
def test_across_epochs_an_interval_is_a_number_of_steps(interval, is_taken):
    if is_taken:
        check_intervals(interval, None)
        return
    with pytest.raises(UserError, match="it counts steps, across epochs"):
        check_intervals(interval, None)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_steps": -1, "max_epochs": None, "num_sanity_val_steps": -1},
        {"max_steps": 0, "log_every_n_steps": 0, "fast_dev_run": True},
        {"limit_train_batches": 0.5, "limit_val_batches": 2.0, "overfit_batches": 3},
        {"devices": "auto"},
        {"devices": [0, 1]},
        {"devices": "0,"},
    ],
)
def test_counts_and_shares_that_lightning_understands_are_taken(settings):
    check_counts(settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_steps": -5}, r"max_steps must be >= -1, got -5 \(-1 sets no limit\)"),
        ({"accumulate_grad_batches": 0}, "accumulate_grad_batches must be >= 1, got 0"),
        ({"check_val_every_n_epoch": 0}, "check_val_every_n_epoch must be >= 1, got 0"),
        ({"log_every_n_steps": -2}, "log_every_n_steps must be >= 0, got -2"),
        ({"limit_train_batches": 1.5}, "must be a whole number, or from 0.0 to 1.0, got 1.5"),
        ({"limit_val_batches": "1"}, "limit_val_batches must be a number, got '1'"),
        ({"devices": "1.5"}, "devices must be auto, or the number of devices from 1 on, got 1.5"),
    ],
)
def test_a_count_out_of_range_is_refused_before_it_fails_late(settings, message):
    with pytest.raises(UserError, match=f"^trainer.*{message}.* Set trainer"):
        check_counts(settings)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("max_step", "max_step: Trainer has no such setting. Did you mean max_steps?"),
        ("callback", "Did you mean callbacks?"),
        ("settings", "settings: Trainer has no such setting."),
        ("num_train_epochs", "no such setting. Set max_epochs of Trainer."),
        ("logging_steps", "Set log_every_n_steps (which is 1 here) of Trainer."),
        (
            "use_liger_kernel",
            "no such setting. For settings of other trainers see docs/guides/migr",
        ),
    ],
)
def test_an_unknown_keyword_is_named_with_the_one_that_was_meant(name, said, tmp_path):
    with pytest.raises(UserError, match=re.escape(said)):
        Trainer(tmp_path, **{name: 1})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"strategy": "ddp_spawn", "devices": 2}, r"got ddp_spawn \(its ranks are copies"),
        ({"strategy": "fsdp"}, r"got fsdp \(Lightning's FSDP .* use fsdp2"),
        ({"strategy": "xyz"}, r"got xyz \(no strategy has this name"),
        ({"accelerator": "gpu"}, r"got gpu, of which torch finds none .* to auto or cpu\.$"),
    ],
)
def test_what_cannot_train_here_is_refused_in_our_words(settings, said, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match=said):
        Trainer(tmp_path, **{"accelerator": "cpu"} | settings)


def test_a_gpu_of_a_mac_is_one(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(MPSAccelerator, "is_available", lambda: True)
    refuse_missing_gpu("gpu")
    with pytest.raises(UserError, match="torch finds none"):
        refuse_missing_gpu("cuda")


def test_several_devices_in_a_notebook_are_told_to_use_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)
    said = (
        r"train with one process, got strategy='ddp', devices=2 \(.*\)\. Save the program in a file"
    )
    with pytest.raises(UserError, match=said):
        Trainer(tmp_path, strategy="ddp", devices=2, accelerator="cpu")
    Trainer(tmp_path, accelerator="cpu")


@pytest.mark.parametrize("call", ["fit", "validate", "test"])
def test_data_and_module_in_the_wrong_order_or_of_other_types_are_refused(call, tmp_path):
    module = make_module(group_size=2)
    data = AdditionData(1, train_size=8, validation_size=0, prompts_per_step=2)
    trainer = Trainer(tmp_path / "run", accelerator="cpu", enable_progress_bar=False)
    method = getattr(trainer, call)
    swapped = f"{call} takes the module first and then the data, got AdditionData and then GRPO"
    with pytest.raises(UserError, match=swapped):
        method(data, module)
    with pytest.raises(UserError, match="an object of type list as the data. Write"):
        method(module, [{"prompt": "1+1="}])
    with pytest.raises(UserError, match="the class GRPOModule as the module"):
        method(type(module), data)
    with pytest.raises(UserError, match="got None as the data. Write"):
        method(module, None)
    assert not (tmp_path / "run").exists()


def test_a_trainer_without_logging_and_checkpoints_is_refused(tmp_path):
    with pytest.raises(UserError, match="barebones must be false, got True .a run always logs"):
        Trainer(tmp_path, barebones=True)
