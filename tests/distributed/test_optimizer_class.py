"""Which state of an optimizer another one can use."""

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer

from lit_grpo.distributed.optimizer_class import has_other_optimizer, optimizer_class
from lit_grpo.training import MasterAdamW


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
