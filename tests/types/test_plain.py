"""Settings as plain values, and the names of functions among them."""

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest

from lit_grpo.types.plain import import_path, is_plain, plain_value


class Callable:
    def __call__(self): ...


def function(): ...


@dataclass(frozen=True)
class Part:
    rate: float = 0.5


@dataclass(frozen=True)
class Whole:
    part: Part = Part()
    none: Part | None = None
    names: frozenset[str] = frozenset({"b", "a"})
    table: dict[str, object] = field(default_factory=lambda: {"f": [function], 1: Part})


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (function, "function"),
        (partial(partial(function)), "function"),
        (Callable(), "Callable"),
        (Callable, "Callable"),
        (Part(), "Part"),
    ],
)
def test_a_function_or_class_has_an_import_path(value, name):
    assert import_path(value) == f"{__name__}.{name}"


@pytest.mark.parametrize(("named", "module"), [({}, ""), ({"name": import_path}, f"{__name__}.")])
def test_dataclasses_and_what_they_contain_are_plain(named, module):
    assert plain_value(Whole(), **named) == {
        "class": "Whole",
        "part": {"class": "Part", "rate": 0.5},
        "none": None,
        "names": ["a", "b"],
        "table": {"f": [f"{module}function"], "1": f"{module}Part"},
    }


def test_numbers_of_numpy_are_those_of_python():
    found = plain_value([np.float64(0.5), np.int64(3), np.bool_(True), 0.5])
    assert found == [0.5, 3, True, 0.5]
    assert [type(one) for one in found] == [float, int, bool, float]


@pytest.mark.parametrize(
    "value", [None, True, 1, 0.5, "a", np.float64(0.5), [(1, {"a": {2: "b"}})]]
)
def test_values_that_any_file_can_hold_are_plain(value):
    assert is_plain(value)


class Number(float): ...


@pytest.mark.parametrize(
    "value",
    [function, object(), {1, 2}, Number(1), float("nan"), [Part()], {"a": Part()}, {Part(): 1}],
)
def test_other_values_and_what_contains_them_are_not_plain(value):
    assert not is_plain(value)
