"""The callbacks that every run has, besides those of the user."""

from __future__ import annotations

import pytest
from lightning.pytorch.callbacks import Callback, ProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import WandbLogger

from lit_grpo import Trainer
from lit_grpo.callbacks import (
    HealthMonitor,
    RolloutProgressBar,
    StallWatchdog,
    WandbTeardown,
    ZeroRewardBreaker,
)


class OwnBar(TQDMProgressBar):
    pass


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["RolloutProgressBar"]),
        ({"callbacks": RolloutProgressBar(every_n_steps=3)}, ["RolloutProgressBar"]),
        ({"callbacks": [OwnBar()]}, ["OwnBar"]),
        ({"enable_progress_bar": False}, []),
    ],
)
def test_there_is_a_progress_bar_unless_the_user_has_another_or_wants_none(
    tmp_path, settings, expected
):
    trainer = Trainer(tmp_path, accelerator="cpu", **settings)
    bars = [one for one in trainer.callbacks if isinstance(one, ProgressBar)]
    assert [type(bar).__name__ for bar in bars] == expected


GUARDS = {HealthMonitor, ZeroRewardBreaker, StallWatchdog, WandbTeardown}


def guards(run_dir, *callbacks, **settings) -> list[Callback]:
    settings = {"accelerator": "cpu", "enable_progress_bar": False} | settings
    trainer = Trainer(run_dir, callbacks=list(callbacks), **settings)
    return [one for one in trainer.callbacks if type(one) in GUARDS]


def test_every_run_is_guarded_and_one_that_logs_to_wandb_against_its_failures(tmp_path):
    assert list(map(type, guards(tmp_path))) == [HealthMonitor, ZeroRewardBreaker, StallWatchdog]
    with_wandb = guards(tmp_path, logger=WandbLogger(project="test", offline=True))
    assert {type(one) for one in with_wandb} == GUARDS


def test_a_guard_of_the_user_replaces_the_default_and_may_switch_it_off(tmp_path):
    own = ZeroRewardBreaker(alert_after=2, stop_after=3)
    assert guards(tmp_path, own)[0] is own
    assert list(map(type, guards(tmp_path, own))).count(ZeroRewardBreaker) == 1
    off = [kind(enabled=False) for kind in (HealthMonitor, ZeroRewardBreaker, StallWatchdog)]
    assert guards(tmp_path, *off) == []
