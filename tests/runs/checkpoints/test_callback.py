from __future__ import annotations

import os
import re

import lightning as L
import pandas as pd
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from needs import needs_deepspeed
from toy_rollouts import fit, outputs, rollouts

from lit_grpo.callbacks import Checkpoints, ZeroRewardBreaker
from lit_grpo.distributed.deepspeed import ZeROStrategy
from lit_grpo.distributed.fsdp2 import FSDP2Strategy
from lit_grpo.runs.checkpoints.files import read_manifest, why_unusable
from lit_grpo.runs.checkpoints.resume import find_checkpoint
from lit_grpo.runs.files.metrics import MetricsFile
from lit_grpo.stopping import get_stop_reason
from lit_grpo.types import UserError

STEP = outputs(rollouts([[0.0, 1.0]]))
ZERO = outputs(rollouts([[0.0, 0.0]]))


def test_a_finished_run_has_a_last_checkpoint(tmp_path):
    fit(lambda step: STEP, [Checkpoints(dirpath=str(tmp_path))], steps=2)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 2


def test_a_crash_keeps_the_earlier_checkpoint(tmp_path):
    fit(lambda step: STEP, [Checkpoints(dirpath=str(tmp_path))], steps=2)
    with pytest.raises(ZeroDivisionError):
        fit(lambda step: 1 // 0, [Checkpoints(dirpath=str(tmp_path))], steps=2)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 2


def test_a_save_that_fails_leaves_the_earlier_checkpoint(tmp_path):
    fit(lambda step: STEP, [Checkpoints(dirpath=str(tmp_path))], steps=1)

    class Unsavable(Callback):
        def on_save_checkpoint(self, trainer, pl_module, checkpoint):
            checkpoint["no"] = (n for n in ())

    with pytest.raises(UserError, match=r"^checkpoint\.no must be .*got builtins\.generator"):
        fit(lambda step: STEP, [Unsavable(), Checkpoints(dirpath=str(tmp_path))], steps=2)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 1


def test_a_stop_by_another_callback_is_saved_and_keeps_its_reason(tmp_path):
    breaker = ZeroRewardBreaker(alert_after=1, stop_after=2)
    trainer = fit(lambda step: ZERO, [breaker, Checkpoints(dirpath=str(tmp_path))], steps=9)
    assert get_stop_reason(trainer).exit_code == 3
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert state["global_step"] == 2
    assert state["callbacks"]["ZeroRewardBreaker"]["streak"] == 2


def test_model_checkpoint_shares_last_ckpt_also_when_the_exit_wrote_it_first(tmp_path):
    def run(steps, **options):
        checkpoint = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=4)
        fit(
            lambda step: STEP,
            [checkpoint, Checkpoints(dirpath=str(tmp_path))],
            steps=steps,
            enable_checkpointing=True,
            **options,
        )

    run(2)
    run(5, ckpt_path=tmp_path / "last.ckpt")
    assert names_in(tmp_path, "*.ckpt") == [
        "epoch=0-step=4.ckpt",
        "last.ckpt",
        "step_000002.ckpt",
        "step_000005.ckpt",
    ]
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 5


def test_a_link_of_that_name_is_replaced_and_its_target_stays(tmp_path):
    (tmp_path / "best.ckpt").write_text("best")
    (tmp_path / "last.ckpt").symlink_to("best.ckpt")
    fit(lambda step: STEP, [Checkpoints(dirpath=str(tmp_path))], steps=1)
    assert (tmp_path / "best.ckpt").read_text() == "best"
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 1


def names_in(directory, pattern="step_*.ckpt"):
    return sorted(path.name for path in directory.glob(pattern))


def every(number, directory, **settings):
    return Checkpoints(
        every_n_steps=number, every_n_seconds=None, dirpath=str(directory), **settings
    )


class Recorded(Callback):
    """Record what is in a directory after each step."""

    def __init__(self, directory):
        self.directory = directory
        self.seen = []

    def on_train_batch_start(self, *args):
        self.seen.append(names_in(self.directory))


@pytest.mark.parametrize("num_updates", [1, 2, 3])
def test_rollout_steps_are_counted_whatever_number_of_optimizer_steps_they_take(
    tmp_path, num_updates
):
    steps = Recorded(tmp_path)
    fit(
        lambda step: STEP,
        [every(2, tmp_path, keep_last=9), steps],
        steps=7 * num_updates,
        num_updates=num_updates,
    )
    assert names_in(tmp_path) == [f"step_00000{n}.ckpt" for n in (1, 2, 4, 6, 7)]
    assert steps.seen[3] == ["step_000001.ckpt", "step_000002.ckpt"]
    assert os.readlink(tmp_path / "last.ckpt") == "step_000007.ckpt"
    saved = torch.load(tmp_path / "step_000004.ckpt", weights_only=True)
    assert saved["global_step"] == 4 * num_updates
    manifest = read_manifest(tmp_path / "step_000004.ckpt")
    assert (manifest.rollout_step, manifest.optimizer_step) == (4, 4 * num_updates)


def test_the_newest_are_kept_also_over_a_resumed_run(tmp_path):
    fit(lambda step: STEP, [every(1, tmp_path)], steps=3)
    assert names_in(tmp_path) == ["step_000002.ckpt", "step_000003.ckpt"]
    fit(lambda step: STEP, [every(2, tmp_path)], steps=5, ckpt_path=tmp_path / "last.ckpt")
    assert names_in(tmp_path) == ["step_000004.ckpt", "step_000005.ckpt"]
    assert {path.name.removesuffix(".json") for path in tmp_path.glob("*.json")} == set(
        names_in(tmp_path)
    )


def test_by_time_a_checkpoint_is_written_once_the_time_has_passed(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("lit_grpo.runs.checkpoints.callback.time.monotonic", lambda: now[0])

    def step(number):
        now[0] += 10.0
        return STEP

    fit(step, [Checkpoints(every_n_seconds=25.0, keep_last=9, dirpath=str(tmp_path))], steps=8)
    assert names_in(tmp_path) == [f"step_00000{n}.ckpt" for n in (1, 4, 7, 8)]


@pytest.fixture
def stopped_clock(monkeypatch):
    """No interval of time passes."""
    monkeypatch.setattr("lit_grpo.runs.checkpoints.callback.time.monotonic", lambda: 0.0)


def healthy_steps(directory):
    manifests = [read_manifest(path) for path in directory.glob("step_*.ckpt")]
    return sorted(one.rollout_step for one in manifests if one.is_healthy)


def test_with_defaults_a_reward_that_dies_within_minutes_leaves_a_healthy_checkpoint(
    tmp_path, stopped_clock
):
    breaker, saving = ZeroRewardBreaker(), Checkpoints(dirpath=str(tmp_path))
    trainer = fit(lambda step: STEP if step < 5 else ZERO, [breaker, saving], steps=99)
    assert get_stop_reason(trainer).exit_code == 3
    assert names_in(tmp_path) == ["step_000001.ckpt", "step_000015.ckpt"]
    assert healthy_steps(tmp_path) == [1]


def test_the_first_checkpoint_is_that_of_the_first_healthy_step(tmp_path, stopped_clock):
    breaker, saving = ZeroRewardBreaker(), Checkpoints(dirpath=str(tmp_path))
    fit(lambda step: STEP if step in (2, 3) else ZERO, [breaker, saving], steps=6)
    assert names_in(tmp_path) == ["step_000003.ckpt", "step_000006.ckpt"]
    assert healthy_steps(tmp_path) == [3]


def test_a_resumed_run_that_has_a_healthy_checkpoint_writes_none_at_its_first_step(
    tmp_path, stopped_clock
):
    def run(steps, **options):
        saving = Checkpoints(keep_last=9, dirpath=str(tmp_path))
        fit(lambda step: STEP, [saving], steps=steps, **options)

    run(2)
    run(5, ckpt_path=tmp_path / "last.ckpt")
    assert names_in(tmp_path) == [f"step_00000{n}.ckpt" for n in (1, 2, 5)]


def test_without_intervals_only_the_end_is_written(tmp_path):
    fit(lambda step: STEP, [every(None, tmp_path)], steps=3)
    assert names_in(tmp_path) == ["step_000003.ckpt"]


def test_checkpoints_by_time_take_no_more_than_a_twentieth_of_it(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("lit_grpo.runs.checkpoints.callback.time.monotonic", lambda: now[0])

    class Slow(Callback):
        def on_save_checkpoint(self, *args):
            now[0] += 2.0

    def step(number):
        now[0] += 10.0
        return STEP

    saving = Checkpoints(every_n_seconds=10.0, keep_last=9, dirpath=str(tmp_path))
    fit(step, [saving, Slow()], steps=10)
    assert names_in(tmp_path) == [f"step_{n:06d}.ckpt" for n in (1, 5, 9, 10)]


# Epochs have three steps, and every second step is followed by a validation: they are written in
# the middle of an epoch and at its end, with and without a validation.
def test_a_directory_that_cannot_be_written_is_refused_before_the_first_step(tmp_path):
    (tmp_path / "afile").touch()

    def step(number):
        raise AssertionError("trained")

    with pytest.raises(
        UserError, match=r"dirpath must be a place that can be written, got .*afile"
    ):
        fit(step, [Checkpoints(dirpath=str(tmp_path / "afile"))], steps=1)


def test_a_run_is_resumed_exactly_from_each_checkpoint(tmp_path):
    def run(*callbacks, steps=8, **options):
        torch.manual_seed(0)
        return fit(
            lambda step: STEP, [*callbacks], steps=steps, validate_every=2, num_batches=3, **options
        )

    saving = every(1, tmp_path, keep_last=9, monitor="val/accuracy", mode="max")
    values = [0.1, 0.5, 0.2, 0.3]
    whole = run(saving, Accuracies(values), logger=MetricsFile(tmp_path / "whole"))
    names = [*names_in(tmp_path)[:-1], "best.ckpt"]
    for name in names:
        first = read_manifest(tmp_path / name).rollout_step
        later = Accuracies(values[first // 2 :])
        directory = tmp_path / name.removesuffix(".ckpt")
        resumed = run(later, ckpt_path=tmp_path / name, logger=MetricsFile(directory))
        assert torch.equal(resumed.model.linear.weight, whole.model.linear.weight)
        rows = pd.read_csv(tmp_path / "whole/metrics.csv").drop(columns=["seconds"])
        again = pd.read_csv(directory / "metrics.csv").drop(columns=["seconds"])
        pd.testing.assert_frame_equal(again, rows[first:].reset_index(drop=True), check_like=True)
    assert read_manifest(tmp_path / "best.ckpt").rollout_step == 4
    assert len(names) == 8


class Accuracies(Callback):
    """Log an accuracy at each validation."""

    def __init__(self, values):
        self.values = iter(values)

    def on_validation_epoch_end(self, trainer, pl_module):
        pl_module.log("val/accuracy", next(self.values))


@pytest.mark.parametrize(("mode", "best"), [("max", (4, 0.7)), ("min", (2, 0.5))])
def test_the_best_is_that_of_the_best_validation(tmp_path, mode, best):
    values = [0.5, 0.7, float("nan"), 0.6]
    saving = every(100, tmp_path, monitor="val/accuracy", mode=mode)
    fit(lambda step: STEP, [Accuracies(values), saving], steps=8, validate_every=2)
    manifest = read_manifest(tmp_path / "best.ckpt")
    assert (manifest.rollout_step, round(manifest.metrics["val/accuracy"], 3)) == best
    assert torch.load(tmp_path / "best.ckpt", weights_only=True)["global_step"] == best[0]


def test_a_metric_for_the_best_that_nothing_logs_is_named_once(tmp_path, caplog):
    saving = every(100, tmp_path, monitor="val/acuracy")
    fit(lambda step: STEP, [Accuracies([0.5, 0.7]), saving], steps=4, validate_every=2)
    (warning,) = (one for one in caplog.messages if "val/acuracy" in one)
    assert "Did you mean val/accuracy?" in warning
    assert "no best.ckpt" in warning
    assert not (tmp_path / "best.ckpt").exists()


def test_the_best_of_a_resumed_run_must_be_better_than_before(tmp_path):
    def run(values, steps, **options):
        saving = every(100, tmp_path, monitor="val/accuracy")
        callbacks = [Accuracies(values), saving]
        fit(lambda step: STEP, callbacks, steps=steps, validate_every=2, **options)

    run([0.5, 0.7], steps=4)
    run([0.6, 0.6], steps=8, ckpt_path=tmp_path / "last.ckpt")
    assert read_manifest(tmp_path / "best.ckpt").rollout_step == 4
    assert read_manifest(tmp_path / "last.ckpt").rollout_step == 8


def test_the_checkpoint_from_before_the_trouble_is_kept_until_it_is_over(tmp_path):
    seen = Recorded(tmp_path)
    breaker = ZeroRewardBreaker(alert_after=5, stop_after=9)
    saving = every(1, tmp_path, keep_last=1)
    fit(lambda step: ZERO if 3 <= step < 7 else STEP, [breaker, saving, seen], steps=9)
    assert seen.seen[3] == ["step_000003.ckpt"]
    assert seen.seen[6] == ["step_000003.ckpt", "step_000006.ckpt"]
    assert seen.seen[8] == ["step_000008.ckpt"]


def test_a_run_that_ends_in_trouble_has_a_checkpoint_from_before_it_and_says_which_is_which(
    tmp_path,
):
    breaker = ZeroRewardBreaker(alert_after=1, stop_after=3)
    saving = every(1, tmp_path, keep_last=1)
    fit(lambda step: ZERO if step >= 2 else STEP, [breaker, saving], steps=9)
    trouble = {name: read_manifest(tmp_path / name).trouble for name in names_in(tmp_path)}
    assert trouble == {
        "step_000002.ckpt": "",
        "step_000005.ckpt": "no reward for 3 rollout steps in a row",
    }


def test_a_checkpoint_of_weights_that_are_not_finite_says_so(tmp_path):
    class Break(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 1:
                pl_module.linear.weight.data.fill_(float("nan"))

    fit(lambda step: STEP, [every(1, tmp_path), Break()], steps=3)
    finite = {path.name: read_manifest(path).is_finite for path in tmp_path.glob("step_*.ckpt")}
    assert finite == {
        "step_000001.ckpt": True, "step_000002.ckpt": False, "step_000003.ckpt": False
    }  # fmt: skip
    assert why_unusable(tmp_path / "last.ckpt") == "its weights are not finite"
    (tmp_path / "checkpoints").mkdir()
    for path in tmp_path.glob("*.ckpt*"):
        path.rename(tmp_path / "checkpoints" / path.name)
    assert find_checkpoint("last", tmp_path).endswith("step_000001.ckpt")


@pytest.mark.parametrize(
    "settings", [{"every_n_steps": 0}, {"every_n_seconds": 0.0}, {"keep_last": 0}]
)
def test_numbers_out_of_range_are_refused(settings):
    (name,) = settings
    with pytest.raises(UserError, match=f"Set Checkpoints.init_args.{name}"):
        Checkpoints(**settings)


@pytest.mark.parametrize(
    ("strategy", "in_background", "warns"),
    [
        (SingleDeviceStrategy, True, True),
        (DDPStrategy, True, True),
        pytest.param(ZeROStrategy, True, True, marks=needs_deepspeed),
        (DDPStrategy, False, False),
        (FSDP2Strategy, True, False),
    ],
)
def test_where_nothing_is_written_in_the_background_a_warning_says_so(
    strategy, in_background, warns, tmp_path, caplog
):
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy(), logger=False)
    saving, module = (
        Checkpoints(dirpath=str(tmp_path), in_background=in_background),
        L.LightningModule(),
    )
    saving.setup(trainer, module, "validate")
    caplog.clear()  # Lightning has given tips
    saving.setup(trainer, module, "fit")
    expected = (
        f"in_background has no effect with {strategy.__name__}.* Set trainer.strategy to fsdp2"
    )
    found = [re.search(expected, line) is not None for line in caplog.messages]
    assert found == [True] * warns
