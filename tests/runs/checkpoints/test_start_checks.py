"""What no checkpoint can hold is refused before the first step."""

from collections import deque

import numpy as np
import pytest
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


def test_hyperparameters_that_no_checkpoint_can_hold_are_refused_before_the_first_step(tmp_path):
    class Mine(SFTModule):
        def __init__(self, policy):
            super().__init__(policy, sampling=Sampling(max_tokens=8))
            self.save_hyperparameters()

    data = AdditionData(1, train_size=8, validation_size=0, prompts_per_step=2)
    trainer = Trainer(tmp_path, max_steps=1, accelerator="cpu", enable_progress_bar=False)
    with pytest.raises(UserError, match=r"save_hyperparameters\.policy must be .*policy\.Policy"):
        trainer.fit(Mine(Policy(architecture=LLAMA)), data)
    close_logs()
