from __future__ import annotations

import random

import numpy as np
import torch
from toy_rollouts import completion, fit, outputs, rollouts, train_batch

import lit_grpo.callbacks
from lit_grpo.callbacks import (
    Checkpoints,
    HealthMonitor,
    RolloutProgressBar,
    TimingLog,
    WandbTeardown,
    ZeroRewardBreaker,
)
from lit_grpo.runs.files.completions import CompletionsFile
from lit_grpo.runs.files.metrics import MetricsFile


def test_no_callback_changes_the_parameters_or_draws_a_random_number(tmp_path):
    cut = [completion("same", "length")] * 2
    step = outputs(rollouts([[0.0, 0.0]], cut), train_batch([0.0, 0.0]))

    def state_after_training(callbacks, logger=False):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        bar = {"enable_progress_bar": bool(callbacks)}
        trainer = fit(lambda number: step, callbacks, steps=4, logger=logger, **bar)
        weight = trainer.model.linear.weight.tolist()
        return weight, random.random(), np.random.random(), torch.rand(1).item()

    watched = state_after_training(
        [
            Checkpoints(dirpath=str(tmp_path)),
            RolloutProgressBar(every_n_steps=1),
            HealthMonitor(),
            TimingLog(stages=True),
            WandbTeardown(),
            ZeroRewardBreaker(),
            CompletionsFile(tmp_path),
        ],
        MetricsFile(tmp_path),
    )
    assert watched == state_after_training([])


def test_every_callback_that_ships_is_exported():
    assert set(lit_grpo.callbacks.__all__) == {
        "Alerts",
        "Checkpoints",
        "PushToHub",
        "RolloutProgressBar",
        "HealthMonitor",
        "Rule",
        "StallWatchdog",
        "TimingLog",
        "WandbTeardown",
        "ZeroRewardBreaker",
    }
    assert all(hasattr(lit_grpo.callbacks, name) for name in lit_grpo.callbacks.__all__)
