"""Which checkpoint a rollback takes, and what it restores from it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lit_grpo.runs.checkpoints.callback import Checkpoints
from lit_grpo.runs.checkpoints.rollback import RollbackHistory, roll_back, step_of
from lit_grpo.runs.checkpoints.writer import CheckpointWriter


class Run:
    """A run with a checkpoint after each of some steps, whose weight is the step."""

    def __init__(self, directory: Path, troubles: dict[int, str]) -> None:
        self.directory = directory
        self.loaded: list[float] = []
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        for step, trouble in troubles.items():
            self.save(step, trouble)
        strategy = SimpleNamespace(
            checkpoint_io=None,
            barrier=lambda name: None,
            broadcast=lambda value: value,
            load_checkpoint=lambda path, **_: torch.load(path, weights_only=False),
            load_model_state_dict=self.load,
            load_optimizer_state_dict=self.load_optimizer,
        )
        self.trainer = SimpleNamespace(
            callbacks=[Checkpoints(dirpath=str(directory))],
            strategy=strategy,
            optimizers=[self.optimizer],
        )

    def path(self, step: int) -> Path:
        return self.directory / f"step_{step:06}.ckpt"

    def save(self, step: int, trouble: str, optimizer: str = "SGD") -> None:
        summary = {"rollout_step": step, "optimizer_step": step, "trouble": trouble, "metrics": {}}
        state = {"weight": torch.tensor(float(step))}
        settings = {"model.optimizer": optimizer}
        CheckpointWriter().save_checkpoint(
            {"state_dict": state, "summary": summary, "run_settings": settings}, self.path(step)
        )

    def load(self, checkpoint, strict) -> None:
        self.loaded.append(checkpoint["state_dict"]["weight"].item())

    def load_optimizer(self, checkpoint) -> None:
        self.optimizer.param_groups[0]["lr"] = 9.0  # that of the checkpoint

    def roll_back(self, before_step: int, **settings) -> int | None:
        """Return the step of the checkpoint that is taken."""
        module = SimpleNamespace(on_roll_back=lambda checkpoint: None)
        path = roll_back(self.trainer, module, before_step, **settings)
        return None if path is None else step_of(path)


@pytest.fixture
def run(tmp_path):
    return lambda troubles: Run(tmp_path, troubles)


def test_the_newest_healthy_checkpoint_from_before_the_trouble_is_taken(run):
    one = run({1: "", 2: "", 3: "no reward", 4: "", 5: ""})
    assert one.roll_back(4) == 2
    assert one.loaded == [2.0]


def test_a_later_one_is_taken_only_if_there_is_none_from_before_and_it_may_be(run):
    one = run({4: "", 5: "", 6: "not finite"})
    assert one.roll_back(3) == 5
    assert one.roll_back(3, only_before=True) is None
    assert one.loaded == [5.0]


def test_what_earlier_rollbacks_have_left_is_passed_over(run):
    one = run({1: "", 2: "", 3: "", 6: ""})
    assert one.roll_back(6, passed_over=[(2, 3)]) == 1
    assert one.roll_back(7, passed_over=[(2, 3)]) == 6


def test_a_damaged_checkpoint_is_passed_over(run):
    one = run({1: "", 2: ""})
    one.path(2).write_bytes(one.path(2).read_bytes()[:-10])
    assert one.roll_back(9) == 1


def test_a_checkpoint_of_another_class_of_optimizers_is_passed_over(run):
    one = run({1: ""})
    one.save(2, "", optimizer="AdamW")
    assert one.roll_back(9) == 1


def test_without_checkpoints_nothing_is_changed(run):
    one = run({1: ""})
    one.trainer.callbacks = []
    assert one.roll_back(9) is None
    assert one.loaded == []


def test_the_present_learning_rate_goes_on(run):
    one = run({1: ""})
    assert one.roll_back(2) == 1
    assert one.optimizer.param_groups[0]["lr"] == 1.0


def test_a_history_knows_which_rollback_did_not_help_and_what_each_has_left():
    history = RollbackHistory()
    assert history.last_without_effect(3) is None
    history.add(at=6, to=2)
    history.add(at=9, to=7)
    assert history.passed_over == [(3, 5), (8, 8)]
    assert history.last_without_effect(9) == (9, 7)
    assert history.last_without_effect(10) is None
