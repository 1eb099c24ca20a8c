"""Which settings a checkpoint keeps, and which differences make a resumed run another one."""

from dataclasses import dataclass, field
from functools import partial

import pytest
from torch import nn

from lit_grpo.training.checks.resume_changes import (
    RunSettings,
    plain_settings,
    refuse_other_policy,
)
from lit_grpo.types import UserError


@dataclass(frozen=True)
class Part:
    rate: float = 0.5


def of_the_user(values):
    return values


@dataclass(frozen=True)
class Whole:
    part: Part = Part()
    none: Part | None = None
    parts: tuple[Part, ...] = (Part(0.25),)
    names: frozenset[str] = frozenset({"b", "a"})
    max_tokens_per_micro_batch: int = 4096
    max_skipped_steps: int = 5
    function: object = of_the_user
    table: dict[str, object] = field(default_factory=lambda: {"x": Part(1.0), "y": object()})


def test_settings_are_plain_values_under_their_keys():
    owner = type("Owner", (), {"update": Whole(), "seed": 3})()
    assert plain_settings(owner, ("update", "seed")) == {
        "update.part.rate": 0.5,
        "update.none": None,
        "update.parts": [{"class": "Part", "rate": 0.25}],
        "update.names": ["a", "b"],
        "update.function": "of_the_user",
        "update.table": {"x": {"class": "Part", "rate": 1.0}, "y": "object"},
        "seed": 3,
    }


@dataclass(frozen=True)
class Soft:
    bound: float = 0.2

    def __call__(self, values):
        return values


def test_a_function_is_compared_by_its_name_whatever_it_carries():
    owner = type("Owner", (), {"first": Soft(), "second": partial(Soft(0.5), values=3)})()
    assert plain_settings(owner, ("first", "second")) == {"first": "Soft", "second": "partial"}


@pytest.fixture
def resumed():
    settings = RunSettings()
    settings.before = {"model.b": None, "model.a": 1, "model.c": 0}
    return settings


def test_settings_that_only_one_side_has_are_no_difference(resumed):
    resumed.add("model", {"a": 1, "later": 3}, may_change=False)
    RunSettings().add("model", {"a": 1}, may_change=False)


def test_all_differences_are_named(resumed):
    with pytest.raises(UserError, match=r"run: model.a: 1 -> 2; model.b: None -> x\. Put those"):
        resumed.add("model", {"a": 2, "b": "x", "c": 0}, may_change=False)
    assert resumed.now == {}


def test_differences_that_are_allowed_are_kept_once(resumed):
    for _ in range(2):
        resumed.add("model", {"a": 2, "b": None}, may_change=True)
    assert resumed.changes == ["model.a: 1 -> 2"]
    assert resumed.now == {"model.a": 2, "model.b": None}


@pytest.mark.parametrize(
    ("saved", "what"),
    [
        ({}, "lacks 1 trained parameters, such as 'weight', "),
        (nn.Linear(3, 1, bias=False).state_dict(), r"has 'weight' of shape \(1, 3\)"),
    ],
)
def test_a_checkpoint_of_another_policy_is_refused_without_naming_a_file_of_the_run(saved, what):
    advice = r"Set the policy as it was in that run \(model\.policy, in Python the Policy"
    what = f"^the checkpoint {what}.*a different policy. {advice}"
    with pytest.raises(UserError, match=what) as caught:
        refuse_other_policy(nn.Linear(2, 1, bias=False), saved, set())
    assert "config.yaml" not in str(caught.value)


def test_code_of_rewards_that_has_changed_is_warned_of_and_kept_anew(caplog):
    settings = RunSettings()
    settings.before = {"rewards.code": {"a": "1", "b": "2", "c": None, "gone": "3"}}
    code = {"a": "1", "b": "5", "c": "4", "new": "6"}
    settings.add_reward_code(code, has_scored=False)  # a bug was mended after the first step
    assert not caplog.records
    settings.add_reward_code(code, has_scored=True)
    (record,) = caplog.records
    assert "the code of reward 'b' is not that of the run so far" in record.message
    assert settings.now["rewards.code"] == code


def test_code_of_functions_that_has_changed_is_warned_of_and_kept_anew(caplog):
    settings = RunSettings()
    settings.before = {"objective.code": {"model.objective.surrogate": "1"}}
    code = {"model.objective.surrogate": "2", "model.advantage.function": "3"}
    settings.add_objective_code(code, has_trained=False)
    assert not caplog.records
    settings.add_objective_code(code, has_trained=True)
    (record,) = caplog.records
    what = "the code of model.objective.surrogate is not that of the run so far: steps from here on"
    assert record.message.startswith(what)
    assert settings.now["objective.code"] == code
