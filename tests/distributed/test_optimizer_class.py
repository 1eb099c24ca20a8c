"""Which state of an optimizer another one can use."""

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer, RMSprop

from lit_grpo.distributed.optimizer_class import (
    has_other_optimizer,
    lacks_state,
    optimizer_class,
)
from lit_grpo.training import MasterAdamW
from lit_grpo.training.optimizer.settings import configured_settings


class Wrapper(Optimizer):
    """Take the steps of another optimizer, and hold its state or one of its own."""

    def __init__(self, inner, *, shares_state):
        super().__init__(inner.param_groups, {})
        self.inner = inner
        if shares_state:
            self.state = inner.state


def params():
    return [torch.nn.Parameter(torch.ones(1))]


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        (SGD(params()), "SGD"),
        (MasterAdamW(params()), "MasterAdamW"),
        (Wrapper(SGD(params()), shares_state=True), "SGD"),
        (Wrapper(SGD(params()), shares_state=False), "Wrapper"),
    ],
)
def test_a_wrapper_counts_as_what_it_wraps_if_both_have_one_state(optimizer, name):
    assert optimizer_class(optimizer) == name


@pytest.mark.parametrize(
    ("before", "kind", "is_other"),
    [
        ("AdamW", AdamW, False),
        ("AdamW", SGD, True),
        ("AdamW", MasterAdamW, True),
    ],
)
def test_a_checkpoint_says_of_which_class_its_state_is(before, kind, is_other):
    checkpoint = {"run_settings": {"model.optimizer": before}}
    assert has_other_optimizer(checkpoint, kind(params())) == is_other


def test_a_checkpoint_of_an_earlier_release_does_not_say_its_class():
    for checkpoint in ({}, {"run_settings": {"model.seed": 0}}):
        assert not has_other_optimizer(checkpoint, SGD(params()))


@pytest.mark.parametrize(
    ("kind", "before", "now", "lacks"),
    [
        (AdamW, {}, {"amsgrad": True}, True),
        (AdamW, {"amsgrad": True}, {}, False),
        (AdamW, {}, {"weight_decay": 0.5, "betas": (0.5, 0.9)}, False),
        (AdamW, {"fused": True}, {"fused": True, "amsgrad": True}, True),
        (RMSprop, {}, {"momentum": 0.9}, True),
        (RMSprop, {"momentum": 0.9}, {"momentum": 0.9, "centered": True}, True),
        (SGD, {}, {"momentum": 0.9}, True),
        (SGD, {"momentum": 0.9}, {"momentum": 0.5, "nesterov": True}, False),
        (AdamW, {}, {"amsgrad": True, "capturable": True}, True),  # as on a GPU
        (MasterAdamW, {}, {"weight_decay": 0.5}, False),
    ],
)
def test_some_settings_need_a_state_that_others_do_not_make(kind, before, now, lacks):
    earlier, present = (kind(params(), lr=0.1, **settings) for settings in (before, now))
    checkpoint = {"optimizer_settings": configured_settings(earlier)}
    assert lacks_state(checkpoint, present) == lacks
    assert lacks_state(checkpoint, Wrapper(present, shares_state=True)) == lacks
    assert has_other_optimizer(checkpoint, present) == lacks
    assert not present.state
    assert all(one.grad is None for one in present.param_groups[0]["params"])


def test_each_group_of_parameters_is_looked_at():
    earlier, present = (
        AdamW([{"params": params()}, {"params": params(), "amsgrad": amsgrad}])
        for amsgrad in (False, True)
    )
    assert lacks_state({"optimizer_settings": configured_settings(earlier)}, present)


def test_a_trial_takes_no_step_of_the_optimizer_itself():
    class Counting(AdamW):
        def __init__(self, *args, **settings):
            super().__init__(*args, **settings)
            self.seen = []

        def step(self, closure=None):
            self.seen.append(self.param_groups[0]["amsgrad"])
            return super().step(closure)

    present = Counting(params(), amsgrad=True)
    torch.optim.lr_scheduler.LambdaLR(present, lambda step: 1.0)  # which wraps its step
    present.register_step_pre_hook(lambda *_: pytest.fail("a hook of the optimizer"))
    checkpoint = {"optimizer_settings": configured_settings(AdamW(params()))}
    assert lacks_state(checkpoint, present)
    assert not present.seen
    assert not present.state


def test_an_optimizer_that_cannot_be_tried_keeps_its_state():
    class NeedsMore(AdamW):
        def step(self):
            raise RuntimeError("only on a GPU")

    checkpoint = {"optimizer_settings": configured_settings(AdamW(params()))}
    assert not lacks_state(checkpoint, NeedsMore(params(), amsgrad=True))
