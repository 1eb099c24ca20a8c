import copy
import logging

import pytest
import torch
from torch.optim import SGD, AdamW

from lit_grpo.distributed.optimizer_class import SETTING
from lit_grpo.training.optimizer.resumed_state import (
    changed_optimizer_settings,
    leave_out_other_optimizer,
    refuse_missing_state,
)
from lit_grpo.training.optimizer.settings import configured_settings
from lit_grpo.types import UserError


class TakesAdamsState(AdamW):
    takes_over = ("AdamW",)


def optimizer(kind=AdamW, **settings):
    return kind([torch.nn.Parameter(torch.ones(3))], lr=0.1, **settings)


@pytest.fixture
def checkpoint():
    """One of AdamW with its defaults."""
    return {
        "run_settings": {SETTING: "AdamW"},
        "optimizer_settings": configured_settings(optimizer()),
        "optimizer_states": ["moments"],
    }


def refuse(checkpoint, now):
    refuse_missing_state(checkpoint, now, checkpoint["optimizer_settings"])


def test_settings_that_differ_are_named_but_not_the_defaults_of_another_class():
    earlier, now = configured_settings(optimizer()), configured_settings(optimizer(eps=1e-6))
    changes = changed_optimizer_settings(earlier, now, is_other_class=False)
    assert changes == [f"{SETTING}.eps: 1e-08 -> 1e-06"]
    other = copy.deepcopy(now)
    other[0]["foreach"] = True
    changes = changed_optimizer_settings(earlier, other, is_other_class=False)
    assert {one.partition(":")[0] for one in changes} == {f"{SETTING}.eps", f"{SETTING}.foreach"}
    assert changed_optimizer_settings(earlier, other, is_other_class=True) == [
        f"{SETTING}.eps: 1e-08 -> 1e-06"
    ]


def test_a_setting_that_needs_more_state_is_refused_unless_the_class_is_another(checkpoint):
    refuse(checkpoint, optimizer(weight_decay=0.5))
    with pytest.raises(UserError, match=r"have: model\.optimizer\.amsgrad: False -> True\. Put"):
        refuse(checkpoint, optimizer(amsgrad=True))
    refuse(checkpoint, optimizer(SGD, momentum=0.9))


@pytest.mark.parametrize(
    ("now", "moments"),
    [(optimizer(SGD), "AdamW"), (optimizer(amsgrad=True), "its settings so far")],
)
def test_state_that_is_of_no_use_is_left_out_and_named(now, moments, checkpoint, caplog):
    caplog.set_level(logging.INFO)
    assert leave_out_other_optimizer(checkpoint, now, loads_itself=False)
    assert checkpoint["optimizer_states"] == []
    assert f"begins with an empty state: the moments of {moments} in" in caplog.text


def test_state_of_the_same_class_or_of_one_that_is_taken_over_stays(checkpoint):
    assert not leave_out_other_optimizer(checkpoint, optimizer(), loads_itself=False)
    kept = optimizer(TakesAdamsState)
    assert not leave_out_other_optimizer(checkpoint, kept, loads_itself=False)
    assert checkpoint["optimizer_states"] == ["moments"]
    assert leave_out_other_optimizer(checkpoint, kept, loads_itself=True)
