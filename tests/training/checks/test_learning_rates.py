"""Learning rates with which a run hardly learns, or is destroyed, are named at its start."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from small_runs import fit, make_module
from tiny import tiny_policy

from lit_grpo.policy import LoRA
from lit_grpo.training import SFTModule
from lit_grpo.training.checks.learning_rates import (
    HOW_TO_SET,
    warn_of_learning_rate,
    warn_of_rate,
    warn_of_warm_up,
)
from lit_grpo.training.optimizer.master_weights import MasterAdamW

WITH_LORA = {"policy": {"lora": LoRA(rank=2)}}


@pytest.mark.parametrize(
    ("max_steps", "warmup_steps", "is_dry", "warns"),
    [(2, 2, False, True), (3, 2, False, False), (-1, 50, False, False), (1, 50, True, False)],
)
def test_a_warm_up_that_lasts_to_the_end_is_named(max_steps, warmup_steps, is_dry, warns, caplog):
    trainer = SimpleNamespace(max_steps=max_steps, fast_dev_run=is_dry)
    warn_of_warm_up(trainer, warmup_steps)
    assert [line.split(":")[0] for line in caplog.messages] == warns * [
        "the learning rate is never reached"
    ]


def make_optimizer(kind: type = torch.optim.AdamW, **settings) -> torch.optim.Optimizer:
    return kind([torch.nn.Parameter(torch.zeros(1))], **settings)


@pytest.mark.parametrize(
    ("optimizer", "meant"),
    [
        (make_optimizer(lr=1e4), " Did you mean 0.0001?"),
        (make_optimizer(MasterAdamW, lr=2e5), " Did you mean 2e-05?"),
        (make_optimizer(lr=10.0), ""),
    ],
)
def test_a_rate_above_1_is_named_with_the_one_that_was_meant(optimizer, meant, caplog):
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)  # warms up from 0
    warn_of_learning_rate(SimpleNamespace(max_steps=1, optimizers=[optimizer]), make_module())
    (message,) = caplog.messages
    assert message.startswith("the learning rate is ")
    assert message.endswith(f"destroys the policy at once.{meant} {HOW_TO_SET}")


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_rate_of_0_is_named(kind, caplog):
    warn_of_rate(make_optimizer(kind, lr=0.0), make_module(**WITH_LORA))
    assert caplog.messages == [f"the learning rate is 0: the policy never changes. {HOW_TO_SET}"]


@pytest.mark.parametrize(
    "optimizer", [make_optimizer(lr=1.0), make_optimizer(torch.optim.SGD, lr=1e4)]
)
def test_a_rate_that_the_optimizer_may_have_is_not_named(optimizer, caplog):
    warn_of_rate(optimizer, make_module())
    assert caplog.messages == []


def test_lora_at_the_rate_of_all_weights_is_named_with_the_usual_one(caplog):
    fit(make_module(**WITH_LORA, optimizer=partial(torch.optim.AdamW, lr=1e-6)))
    (message,) = (one for one in caplog.messages if "learning rate" in one)
    assert message.startswith("the learning rate is 1e-06, and policy.lora is set: LoRA usually")
    assert "about 1e-05 here" in message


def test_lora_at_a_rate_of_its_own_and_all_weights_at_a_low_one_are_not_named(caplog):
    warn_of_rate(make_optimizer(lr=5e-6), make_module(**WITH_LORA))
    warn_of_rate(make_optimizer(lr=1e-6), make_module())
    warn_of_rate(make_optimizer(torch.optim.SGD, lr=1e-6), make_module(**WITH_LORA))
    assert caplog.messages == []


def test_the_usual_rate_of_lora_is_another_one_for_sft(caplog):
    warn_of_rate(make_optimizer(lr=2e-5), SFTModule(tiny_policy(lora=LoRA(rank=2))))
    assert "about 0.0002 here" in caplog.text


def test_a_class_alone_trains_at_a_rate_that_nobody_has_set(caplog):
    fit(make_module(optimizer=torch.optim.AdamW))
    (message,) = (one for one in caplog.messages if "learning rate" in one)
    assert message.startswith("the optimizer is made by the class AdamW alone, with its own")
    assert message.endswith("functools.partial(AdamW, lr=...).")
