import math
from fractions import Fraction
from types import NoneType

import pytest

from lit_grpo.data import MixtureSource
from lit_grpo.objective import KLTerm, Objective
from lit_grpo.rollout import RolloutEngine, Sampling
from lit_grpo.types import UserError, check_range, setting_error
from lit_grpo.types.settings import as_object, check_type, list_some


def test_a_refused_setting_names_key_rule_value_reason_and_fix():
    error = setting_error("model.update.epochs", ">= 1", 0, "every step updates the policy")
    assert isinstance(error, UserError)
    assert str(error) == (
        "update.epochs must be >= 1, got 0 (every step updates the policy). "
        "Set model.update.epochs."
    )


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("data.seed", "data.seed"),
        ("model.group_size", "group_size"),
        ("model.engine.init_args.max_concurrent", "max_concurrent"),
    ],
)
def test_a_refused_setting_is_named_without_the_prefix_of_its_key(key, name):
    assert str(setting_error(key, ">= 1", 0)) == f"{name} must be >= 1, got 0. Set {key}."


def test_a_class_in_place_of_an_object_is_told_how_to_write_it():
    with pytest.raises(
        UserError, match=r"got the class Fraction \(write Fraction\(\.\.\.\)\)\. Set"
    ):
        check_type("model.evaluation", Fraction, Fraction)


def test_a_value_that_takes_many_lines_is_named_by_its_type():
    with pytest.raises(UserError, match=r"of type Fraction, got a list\. Set model.evaluation"):
        check_type("model.evaluation", [["row"] * 9] * 9, Fraction)


@pytest.mark.parametrize(
    ("bounds", "inside", "outside", "rule"),
    [
        ({"at_least": 1}, [1, math.inf], [0, -1], ">= 1"),
        ({"at_least": 0.5}, [0.5], [0.4], ">= 0.5"),
        ({"above": 0}, [0.1], [0, -1], "positive"),
        ({"above": 2}, [2.1], [2], "> 2"),
        ({"at_most": 1_000_000}, [1_000_000, -5], [1_000_001], "<= 1000000"),
        ({"at_least": 0, "at_most": 1}, [0, 1], [-0.1, 1.1], "from 0 to 1"),
        ({"above": 0, "at_most": 1}, [0.1, 1], [0, 1.1], "positive and <= 1"),
        ({}, [0, -math.inf], [], "a number"),
    ],
)
def test_a_range_accepts_its_bounds_and_refuses_all_else_with_the_rule(
    bounds, inside, outside, rule
):
    for value in [*inside, None]:
        check_range("data.x", value, **bounds)
    for value in [*outside, math.nan]:
        with pytest.raises(UserError) as error:
            check_range("data.x", value, **bounds, why="reason")
        assert str(error.value) == f"data.x must be {rule}, got {value} (reason). Set data.x."


@pytest.mark.parametrize("value", [True, "3"])
def test_what_is_no_number_is_in_no_range(value):
    with pytest.raises(UserError, match=f"^data.x must be a number, got {value!r}. Set data.x.$"):
        check_range("data.x", value, at_least=0)


@pytest.mark.parametrize(
    ("names", "separator", "listed"),
    [
        (["a", "b"], ", ", "a, b"),
        (["a", "b", "c"], ", ", "a, b and 1 more"),
        (["a", "b", "c", "d"], "; ", "a; b; and 2 more"),
    ],
)
def test_the_first_of_many_names_are_listed(names, separator, listed):
    assert list_some(names, 2, separator) == listed


@pytest.mark.parametrize(
    ("value", "kinds", "fix"),
    [
        ({"max_tokens": 8}, [Sampling], "write Sampling(max_tokens=8), of lit_grpo.rollout"),
        (
            {"kl": {"coef": 0.1}, "surrogate": "clip"},
            [Objective],
            "write Objective(kl=KLTerm(coef=0.1), surrogate='clip'), of lit_grpo.objective",
        ),
        (
            {"data": {"train": "a.jsonl"}, "adaptive": {"success": 2.0}},
            [MixtureSource],
            "write MixtureSource(data={'train': 'a.jsonl'}, adaptive=Adaptive(success=2.0)), of "
            "lit_grpo.data",
        ),
        ("x", [NoneType, Objective], "write Objective(...), of lit_grpo.objective"),
        (0.1, [KLTerm], "write KLTerm(...), of lit_grpo.objective"),
        ("hf", [RolloutEngine], "write HFEngine(...), of lit_grpo.rollout"),
        ("xyzzy", [RolloutEngine], ""),  # abstract
        ({"a": 1}, [int, dict], ""),
        ([1], [Sampling], ""),
    ],
)
def test_settings_as_in_a_config_are_told_how_to_be_an_object(value, kinds, fix):
    assert as_object(value, kinds) == fix
