"""What no checkpoint can hold is refused before the first step."""

from collections import deque

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from python_runs import train
from run_logs import close_logs
from small_runs import ShareOfLowBytes
from tiny import LLAMA

from lit_grpo import AdditionData, Trainer
from lit_grpo.policy import Policy
from lit_grpo.rollout import Sampling
from lit_grpo.training import SFTModule
from lit_grpo.types import UserError


class Window(ShareOfLowBytes):
    def state_dict(self):
        return {"window": deque([0.5])}

    def load_state_dict(self, state):
        pass


class Remembers(Callback):
    def state_dict(self):
        return {"seen": np.zeros(2)}


@pytest.mark.parametrize(
    ("callbacks", "rewards", "message"),
    [
        ([], [Window()], r"rewards\.window\.window must be a number.*, got collections\.deque"),
        ([Remembers()], None, r"Remembers\.state_dict\(\)\.seen must be .*, got numpy\.ndarray"),
    ],
)
def test_a_state_that_no_checkpoint_can_hold_is_refused_before_the_first_step(
    callbacks, rewards, message, tmp_path
):
    with pytest.raises(UserError, match=message):
        train(tmp_path, *callbacks, changed={"rewards": rewards})
    assert not list(tmp_path.rglob("*.parquet"))


class Mine(SFTModule):
    def __init__(self, alpha, *, names=(), **settings):
        super().__init__(sampling=Sampling(max_tokens=8), **settings)
        self.save_hyperparameters(*names)


class MyData(AdditionData):
    def __init__(self, beta):
        super().__init__(1, train_size=8, validation_size=0, prompts_per_step=2)
        self.save_hyperparameters()


def fit(run_dir, alpha=2.0, beta=0.5, names=()):
    policy = Policy(architecture=LLAMA)
    module = Mine(alpha, names=names, policy=policy, warmup_steps=7)
    trainer = Trainer(run_dir, max_steps=1, accelerator="cpu", enable_progress_bar=False)
    try:
        trainer.fit(module, MyData(beta))
    finally:
        close_logs()
    return module


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": deque()}, r"Mine\.hparams\.alpha must be .*deque.* leave it out"),
        ({"names": ["policy"]}, r"Mine\.hparams\.policy must be .*policy\.Policy"),
        ({"beta": deque()}, r"MyData\.hparams\.beta must be .*collections\.deque"),
    ],
)
def test_hyperparameters_that_no_checkpoint_can_hold_are_refused_before_the_first_step(
    settings, message, tmp_path
):
    with pytest.raises(UserError, match=message):
        fit(tmp_path, **settings)


def test_hyperparameters_that_were_named_stay():
    class Named(SFTModule):
        def __init__(self, seed):
            super().__init__(Policy(architecture=LLAMA), seed=seed)
            self.save_hyperparameters("seed")

    class Last(Named):
        def __init__(self, seed, beta):
            super().__init__(seed)
            self.save_hyperparameters()

    assert dict(Last(3, 0.5).hparams) == {"seed": 3, "beta": 0.5}


def test_the_hyperparameters_of_a_subclass_are_its_arguments_but_objects_of_the_module(tmp_path):
    module = fit(tmp_path)
    assert dict(module.hparams) == {"alpha": 2.0, "names": (), "warmup_steps": 7}
    saved = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)
    assert saved["hyper_parameters"] == dict(module.hparams)
    assert saved["datamodule_hyper_parameters"] == {"beta": 0.5}
