"""A resumed optimizer has the settings of the config, and keeps what it has set itself."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from small_runs import PROMPTS, make_module, make_trainer
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from lit_grpo.callbacks import Checkpoints
from lit_grpo.data.loading.loader import PromptLoader
from lit_grpo.training.optimizer.settings import apply_settings, configured_settings


def make_optimizer(**settings) -> AdamW:
    first, second = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    return AdamW([{"params": [first]}, {"params": [second], "weight_decay": 0.5}], **settings)


def trainer_of(optimizer: AdamW, num_steps: int = 0) -> SimpleNamespace:
    """Return the parts of a trainer whose learning rate halves with every step."""
    schedule = LambdaLR(optimizer, lambda step: 1 / 2**step)
    for _ in range(num_steps):
        optimizer.step()
        schedule.step()
    configs = [SimpleNamespace(scheduler=schedule)]
    return SimpleNamespace(optimizers=[optimizer], lr_scheduler_configs=configs)


def configured(**settings) -> list[dict]:
    """Return the settings of a config, as of a run that has not begun."""
    optimizer = make_optimizer(**settings)
    trainer_of(optimizer)
    return configured_settings(optimizer)


def test_settings_are_those_of_each_group_without_what_changes_in_a_run():
    first, second = configured(lr=0.1, weight_decay=0.25)
    assert not {"params", "lr"} & first.keys()
    assert (first["weight_decay"], second["weight_decay"]) == (0.25, 0.5)
    assert first["initial_lr"] == second["initial_lr"] == 0.1


def test_another_learning_rate_follows_the_schedule_from_where_it_is():
    optimizer = make_optimizer(lr=0.1)
    trainer = trainer_of(optimizer, num_steps=2)
    apply_settings(trainer, configured(lr=0.8), configured(lr=0.1))
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.2, 0.2])
    optimizer.step()
    trainer.lr_scheduler_configs[0].scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1, 0.1])


def test_only_settings_that_the_config_has_changed_are_applied():
    optimizer = make_optimizer(lr=0.1)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.75  # as an optimizer may do it
    trainer = trainer_of(optimizer)
    earlier = configured(lr=0.1, betas=(0.9, 0.99))
    apply_settings(trainer, configured(lr=0.1, betas=(0.8, 0.99)), earlier)
    for group in optimizer.param_groups:
        assert (group["betas"], group["weight_decay"]) == ((0.8, 0.99), 0.75)


def test_a_setting_that_is_new_is_applied():
    optimizer = make_optimizer(lr=0.1)
    earlier = configured(lr=0.1)
    for settings in earlier:
        del settings["amsgrad"]
    apply_settings(trainer_of(optimizer), configured(lr=0.1, amsgrad=True), earlier)
    assert [group["amsgrad"] for group in optimizer.param_groups] == [True, True]


class CountsItsSteps(torch.optim.SGD):
    """Keep state among its settings, as Prodigy and schedule-free optimizers do."""

    def __init__(self, params, lr=1.0, momentum=0.0):
        super().__init__(params, lr=lr, momentum=momentum)
        for group in self.param_groups:
            group["num_steps"] = 0

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["num_steps"] += 1


def test_a_resumed_optimizer_keeps_its_own_state_and_takes_new_settings(tmp_path):
    def settings(momentum, max_steps, **resume):
        module = make_module(optimizer=lambda params: CountsItsSteps(params, momentum=momentum))
        trainer = make_trainer(Checkpoints(dirpath=str(tmp_path)), max_steps=max_steps)
        trainer.fit(module, PromptLoader(PROMPTS, 4), weights_only=True, **resume)
        (group,) = trainer.optimizers[0].param_groups
        return group["num_steps"], group["momentum"]

    assert settings(0.25, max_steps=2) == (2, 0.25)
    assert settings(0.5, max_steps=3, ckpt_path=tmp_path / "last.ckpt") == (3, 0.5)


@pytest.mark.parametrize("max_steps", [4, 8])
def test_a_schedule_that_a_longer_run_changes_is_logged_with_the_rate(max_steps, tmp_path, caplog):
    caplog.set_level("INFO")
    for steps, resume in ((4, {}), (max_steps, {"ckpt_path": tmp_path / "step_000002.ckpt"})):
        trainer = make_trainer(Checkpoints(dirpath=str(tmp_path), every_n_steps=2), max_steps=steps)
        module = make_module(optimizer=partial(torch.optim.SGD, lr=1.0), lr_schedule="cosine")
        trainer.fit(module, PromptLoader(PROMPTS, 4), weights_only=True, **resume)
    rates = "goes on at 0.854, not 0.5: its schedule has changed, as by another max_steps"
    assert (f"the learning rate {rates}" in caplog.messages) == (max_steps == 8)


def test_a_rate_of_another_optimizer_is_not_compared(caplog):
    caplog.set_level("INFO")
    optimizer = make_optimizer(lr=0.1)
    trainer = trainer_of(optimizer, num_steps=2)
    optimizer.param_groups[0]["lr"] = 0.1  # its state, the step count too, was dropped
    same = configured(lr=0.1)
    apply_settings(trainer, same, same)
    assert caplog.messages == []
    optimizer.param_groups[0]["lr"] = 0.1
    apply_settings(trainer, same, configured(lr=0.1))
    assert "the learning rate goes on at 0.025, not 0.1" in caplog.text
